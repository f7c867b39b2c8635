"""What a checkpoint is on disk: names, contents and checks of its files, and putting them in place."""
