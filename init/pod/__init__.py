"""What any child of PID 1 may use: the pod it is in, a word to PID 1, a watch on a directory, Kubernetes."""
