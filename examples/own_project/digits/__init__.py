"""Made-up digits, and a model that tells them apart."""
