"""What is OpenPBS's only."""
