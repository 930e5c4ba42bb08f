#include "cuda/runtime/disk_cache.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/runtime/sha256.h"

namespace jax_flash {
namespace {

namespace fs = std::filesystem;

// A file is: magic, 64 digits of SHA-256 over the rest, 8 bytes of log size (little endian), log,
// cubin.
constexpr std::string_view kMagic = "jax_flash kernel 1\n";
constexpr std::size_t kDigest = 64;
constexpr char kSuffix[] = ".kernel";
constexpr char kUnfinished[] = ".tmp";
// A write takes milliseconds: an older unfinished file belongs to a process that died.
constexpr auto kAbandoned = std::chrono::hours(1);

std::string Payload(const CachedImage& image) {
  std::string payload;
  for (int i = 0; i < 8; ++i) payload += static_cast<char>(image.log.size() >> (8 * i));
  return payload + image.log + image.cubin;
}

std::optional<CachedImage> Parse(std::string_view file) {
  if (file.substr(0, kMagic.size()) != kMagic) return std::nullopt;
  file.remove_prefix(kMagic.size());
  if (file.size() < kDigest + 8) return std::nullopt;
  const std::string_view digest = file.substr(0, kDigest);
  const std::string_view payload = file.substr(kDigest);
  if (Sha256().Add(payload).Hex() != digest) return std::nullopt;
  std::uint64_t log_size = 0;
  for (int i = 0; i < 8; ++i) {
    log_size |= std::uint64_t{static_cast<unsigned char>(payload[i])} << (8 * i);
  }
  if (log_size > payload.size() - 8) return std::nullopt;
  return CachedImage{std::string(payload.substr(8, log_size)),
                     std::string(payload.substr(8 + log_size))};
}

}  // namespace

std::optional<CachedImage> DiskCache::Read(const std::string& key) const {
  if (folder_.empty()) return std::nullopt;
  const fs::path path = fs::path(folder_) / (key + kSuffix);
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  const std::string file((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::optional<CachedImage> image = Parse(file);
  std::error_code ignored;
  if (image) {
    fs::last_write_time(path, fs::file_time_type::clock::now(), ignored);
  } else {
    fs::remove(path, ignored);
  }
  return image;
}

void DiskCache::Write(const std::string& key, const CachedImage& image) const {
  if (folder_.empty()) return;
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) return;
  const std::string payload = Payload(image);
  const auto thread = std::hash<std::thread::id>()(std::this_thread::get_id());
  const fs::path path = fs::path(folder_) / (key + kSuffix);
  const fs::path unfinished =
      path.string() + "." + std::to_string(getpid()) + "." + std::to_string(thread) + kUnfinished;
  {
    std::ofstream out(unfinished, std::ios::binary | std::ios::trunc);
    out << kMagic << Sha256().Add(payload).Hex() << payload;
    out.close();
    if (!out) {
      fs::remove(unfinished, error);
      return;
    }
  }
  fs::rename(unfinished, path, error);
  if (error) {
    fs::remove(unfinished, error);
    return;
  }
  Evict();
}

void DiskCache::Evict() const {
  struct Entry {
    fs::file_time_type used;
    std::uint64_t size;
    fs::path path;
  };
  std::vector<Entry> entries;
  std::uint64_t total = 0;
  std::error_code error;
  const auto now = fs::file_time_type::clock::now();
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    // Another process may remove a file while it is looked at: it then counts as gone.
    std::error_code gone;
    const auto used = fs::last_write_time(it->path(), gone);
    const std::uint64_t size = gone ? 0 : fs::file_size(it->path(), gone);
    if (gone) continue;
    if (it->path().extension() == kUnfinished) {
      if (now - used > kAbandoned) fs::remove(it->path(), gone);
    } else if (it->path().extension() == kSuffix) {
      entries.push_back({used, size, it->path()});
      total += size;
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.used < b.used; });
  for (const Entry& entry : entries) {
    if (total <= bound_) break;
    if (fs::remove(entry.path, error)) total -= entry.size;
  }
}

}  // namespace jax_flash
