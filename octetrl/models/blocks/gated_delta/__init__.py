"""Linear attention by the gated delta rule."""
