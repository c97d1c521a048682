"""What trained drafters share: their folders on disk, parts of published layouts, and how they are widened."""
