"""Files in and out: strict decoding, bounded JSON and TOML, atomic writes."""
