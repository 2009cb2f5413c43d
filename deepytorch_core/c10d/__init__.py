"""The backend of torch.distributed is switched on, built and upgraded to here."""
