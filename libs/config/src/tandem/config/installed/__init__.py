"""Arguments and fields of installed packages, read from source without importing the packages."""
