"""Multi-head latent attention (MLA): all heads read one small latent of each token."""
