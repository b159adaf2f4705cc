"""Access to files on local disks, in object stores and on the Hugging Face hub."""
