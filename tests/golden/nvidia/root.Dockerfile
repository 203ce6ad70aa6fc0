# root: The smallest Debian that apt works in, from the mirror, without a container registry
FROM the vendor base
ADD layer.tar /
ENV LANG="C.UTF-8"

# packages
# - ca-certificates
# - passwd

# downloads

# artifacts

# sources
