"""Write files atomically, lock run folders against a second writer, and download files from the Hub."""
