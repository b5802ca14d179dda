"""Whether a server's output is the same with speculation as without: what `headway audit` asks and how it judges the answers."""
