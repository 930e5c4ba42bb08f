// Owns the compiled kernels kept on disk: one file per content hash, shared by all processes of a
// user. A file is written under another name and renamed, so readers see all of it or nothing; its
// checksum is read first, so a damaged file counts as absent. What is read becomes code on the GPU,
// so only what this user alone can write is read. Nothing here can fail or wait: a cache that
// cannot be read or written is an empty one.

#ifndef JAX_FLASH_CUDA_RUNTIME_DISK_CACHE_H_
#define JAX_FLASH_CUDA_RUNTIME_DISK_CACHE_H_

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace jax_flash {

struct CachedImage {
  std::string log;
  std::string cubin;
};

// A file descriptor, closed at the end; -1: none.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;

  explicit operator bool() const { return number_ >= 0; }
  int number() const { return number_; }
  int Release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

class DiskCache {
 public:
  // `folder` is created on the first write, for this user alone; empty turns the cache off. `bound`
  // is in bytes.
  DiskCache(std::string folder, std::uint64_t bound) : folder_(std::move(folder)), bound_(bound) {}

  // The entry named `key`, now the most recently used; a damaged one is removed.
  std::optional<CachedImage> Read(const std::string& key) const;

  // Writes the entry, then removes the least recently used ones beyond the bound.
  void Write(const std::string& key, const CachedImage& image) const;

 private:
  Descriptor OpenFolder() const;
  void Evict(const Descriptor& folder) const;

  // Whether this user owns what `status` is of and nobody else may write it. Says why not on
  // stderr, the first time.
  bool Trusts(const std::string& path, const struct stat& status) const;

  std::string folder_;
  std::uint64_t bound_;
  mutable std::atomic<bool> warned_{false};
};

}  // namespace jax_flash

#endif  // JAX_FLASH_CUDA_RUNTIME_DISK_CACHE_H_
