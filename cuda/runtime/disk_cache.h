// Owns the compiled kernels kept on disk: one file per content hash, shared by all processes of a
// user. A file is written under another name and renamed, so readers see all of it or nothing; its
// checksum is read first, so a damaged file counts as absent. Nothing here can fail: a cache that
// cannot be read or written is an empty one.

#ifndef JAX_FLASH_CUDA_RUNTIME_DISK_CACHE_H_
#define JAX_FLASH_CUDA_RUNTIME_DISK_CACHE_H_

#include <cstdint>
#include <optional>
#include <string>

namespace jax_flash {

struct CachedImage {
  std::string log;
  std::string cubin;
};

class DiskCache {
 public:
  // `folder` is created on the first write; empty turns the cache off. `bound` is in bytes.
  DiskCache(std::string folder, std::uint64_t bound) : folder_(std::move(folder)), bound_(bound) {}

  // The entry named `key`, now the most recently used; a damaged one is removed.
  std::optional<CachedImage> Read(const std::string& key) const;

  // Writes the entry, then removes the least recently used ones beyond the bound.
  void Write(const std::string& key, const CachedImage& image) const;

 private:
  void Evict() const;

  std::string folder_;
  std::uint64_t bound_;
};

}  // namespace jax_flash

#endif  // JAX_FLASH_CUDA_RUNTIME_DISK_CACHE_H_
