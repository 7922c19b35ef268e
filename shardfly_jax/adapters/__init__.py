"""What lets other frameworks drive updates through their own interfaces."""
