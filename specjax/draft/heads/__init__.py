"""The common part of trained drafters: their folders on disk, parts of published layouts, and widening."""
