"""What flows through a network: inputs, activations, metrics of outputs, fitting, distillation."""
