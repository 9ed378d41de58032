"""Training recipes that come with Outpace: at present the model in the box, `outpace-tiny`."""
