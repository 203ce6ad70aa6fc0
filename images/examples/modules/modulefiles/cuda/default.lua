-- /usr/local/cuda is the image's CUDA: libraries on workers, the compiler in the -devel images.
local root = "/usr/local/cuda"
if not isDir(root) then
   LmodError("this image has no CUDA: load the module in a job, or log in to an image with the compiler")
end
whatis("CUDA and NCCL of the image")
setenv("CUDA_HOME", root)
prepend_path("PATH", pathJoin(root, "bin"))
prepend_path("CPATH", pathJoin(root, "include"))
prepend_path("LIBRARY_PATH", pathJoin(root, "lib64"))
prepend_path("LD_LIBRARY_PATH", pathJoin(root, "lib64"))
