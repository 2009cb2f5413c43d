"""Text, conversations, pairs and images become batches here."""
