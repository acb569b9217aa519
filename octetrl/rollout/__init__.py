"""From tasks to scored groups to samples. No torch: token ids go out, records come back."""
