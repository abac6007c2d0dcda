"""cgpud: the trio shell around state, plan, gate and tree."""
