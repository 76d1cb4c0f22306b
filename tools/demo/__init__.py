"""What the demonstration model is made of: its shape, its data, its training and its export."""
