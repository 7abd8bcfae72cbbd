"""What train.py is made of; compose.py says how."""
