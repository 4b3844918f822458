"""Methods that remove whole channels: the graph of channels, trials, sensitivities."""
