"""Every other room stands on this one: options, messages, errors, patches, stores."""
