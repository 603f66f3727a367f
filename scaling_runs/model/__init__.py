"""A discrete-event model of what cannot be measured on the machine at hand."""
