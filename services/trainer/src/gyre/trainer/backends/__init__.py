"""What computes gradients and updates; chosen by configuration, alike to the rest of the trainer."""
