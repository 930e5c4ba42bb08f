#include "cuda/runtime/disk_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string_view>
#include <vector>

#include "cuda/runtime/sha256.h"

namespace jax_flash {
namespace {

// A file is: magic, 64 digits of SHA-256 over the rest, 8 bytes of log size (little endian), log,
// cubin.
constexpr std::string_view kMagic = "jax_flash kernel 1\n";
constexpr std::size_t kDigest = 64;
constexpr std::string_view kSuffix = ".kernel";
constexpr std::string_view kUnfinished = ".tmp";
// A write takes milliseconds: an older unfinished file belongs to a process that died.
constexpr std::time_t kAbandoned = 3600;  // seconds

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

bool EndsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

std::string EntryName(const std::string& key) { return key + std::string(kSuffix); }

// A name beside `entry` that no other process can know beforehand; empty without random numbers.
std::string UnfinishedName(const std::string& entry) {
  unsigned char random[16];
  if (getrandom(random, sizeof(random), GRND_NONBLOCK) != sizeof(random)) return "";
  std::string name = entry + ".";
  for (unsigned char byte : random) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name + std::string(kUnfinished);
}

// The first `size` bytes of a file.
std::optional<std::string> ReadAll(const Descriptor& file, std::size_t size) {
  std::string content(size, '\0');
  std::size_t done = 0;
  while (done < size) {
    const ssize_t count = read(file.number(), content.data() + done, size - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    done += count;
  }
  return content;
}

bool WriteAll(const Descriptor& file, std::string_view content) {
  while (!content.empty()) {
    const ssize_t count = write(file.number(), content.data(), content.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    content.remove_prefix(count);
  }
  return true;
}

// Makes the folder and those above it, as far as they are missing.
void MakeFolders(const std::string& folder) {
  for (std::size_t end = folder.find('/', 1); end != std::string::npos;
       end = folder.find('/', end + 1)) {
    mkdir(folder.substr(0, end).c_str(), 0700);
  }
  mkdir(folder.c_str(), 0700);
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

bool DiskCache::Trusts(const std::string& path, const struct stat& status) const {
  const bool own = status.st_uid == geteuid();
  if (own && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0) return true;
  if (!warned_.exchange(true)) {
    const std::string why = own ? "others than its owner may write it (chmod go-w)"
                                : "it belongs to user " + std::to_string(status.st_uid) +
                                      ", not to user " + std::to_string(geteuid());
    std::fprintf(stderr,
                 "jax_flash: ignoring %s in the cache of compiled kernels: %s. "
                 "JAX_FLASH_CACHE_DIR may name another folder.\n",
                 path.c_str(), why.c_str());
  }
  return false;
}

Descriptor DiskCache::OpenFolder() const {
  if (folder_.empty()) return Descriptor(-1);
  Descriptor folder(open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat status;
  if (!folder || fstat(folder.number(), &status) != 0 || !Trusts(folder_, status)) {
    return Descriptor(-1);
  }
  return folder;
}

std::optional<CachedImage> DiskCache::Read(const std::string& key) const {
  const Descriptor folder = OpenFolder();
  if (!folder) return std::nullopt;
  const std::string name = EntryName(key);
  // What is no file might wait for somebody (a FIFO) or never end (a device).
  const Descriptor file(openat(folder.number(), name.c_str(),
                               O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC));
  struct stat status;
  if (!file || fstat(file.number(), &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
  if (!Trusts(folder_ + "/" + name, status)) return std::nullopt;
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size > bound_) return std::nullopt;
  const std::optional<std::string> content = ReadAll(file, size);
  if (!content) return std::nullopt;
  std::optional<CachedImage> image = Parse(*content);
  if (image) {
    futimens(file.number(), nullptr);
  } else {
    unlinkat(folder.number(), name.c_str(), 0);
  }
  return image;
}

void DiskCache::Write(const std::string& key, const CachedImage& image) const {
  if (folder_.empty()) return;
  MakeFolders(folder_);
  const Descriptor folder = OpenFolder();
  if (!folder) return;
  const std::string name = EntryName(key), unfinished = UnfinishedName(name);
  if (unfinished.empty()) return;
  Descriptor file(openat(folder.number(), unfinished.c_str(),
                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) return;
  const std::string payload = Payload(image);
  const bool written = WriteAll(file, kMagic) && WriteAll(file, Sha256().Add(payload).Hex()) &&
                       WriteAll(file, payload);
  const bool closed = close(file.Release()) == 0;  // some file systems tell of a full disk here
  if (!written || !closed ||
      renameat(folder.number(), unfinished.c_str(), folder.number(), name.c_str()) != 0) {
    unlinkat(folder.number(), unfinished.c_str(), 0);
    return;
  }
  Evict(folder);
}

void DiskCache::Evict(const Descriptor& folder) const {
  struct Entry {
    struct timespec used;
    std::uint64_t size;
    std::string name;
  };
  std::vector<Entry> entries;
  std::uint64_t total = 0;
  Descriptor listed(openat(folder.number(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!listed) return;
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(fdopendir(listed.number()), closedir);
  if (listing == nullptr) return;
  listed.Release();  // the listing's now
  const std::time_t now = std::time(nullptr);
  while (const dirent* found = readdir(listing.get())) {
    const std::string name = found->d_name;
    struct stat status;
    // Another process may remove a file while it is looked at: it then counts as gone.
    if (fstatat(folder.number(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (!S_ISREG(status.st_mode)) continue;
    if (EndsWith(name, kUnfinished)) {
      if (now - status.st_mtim.tv_sec > kAbandoned) unlinkat(folder.number(), name.c_str(), 0);
    } else if (EndsWith(name, kSuffix)) {
      const auto size = static_cast<std::uint64_t>(status.st_size);
      entries.push_back({status.st_mtim, size, name});
      total += size;
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.used.tv_sec != b.used.tv_sec ? a.used.tv_sec < b.used.tv_sec
                                          : a.used.tv_nsec < b.used.tv_nsec;
  });
  for (const Entry& entry : entries) {
    if (total <= bound_) break;
    if (unlinkat(folder.number(), entry.name.c_str(), 0) == 0) total -= entry.size;
  }
}

}  // namespace jax_flash
