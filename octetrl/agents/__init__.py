"""Programs that speak to the policy over HTTP, and the capture of their calls as samples."""
