"""What installed packages take and hold, read from their source: nothing of them is imported"""
