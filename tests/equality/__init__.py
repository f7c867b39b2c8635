"""What is equal on which engine: modules and optimizers by strategy names, as the guides' table shows them."""
