"""What BaPipe shows: timelines as text, as SVG and as a trace."""
