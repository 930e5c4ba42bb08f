// Owns SHA-256 (FIPS 180-4): names cache entries by their content and detects corrupt ones.

#ifndef JAX_FLASH_CUDA_RUNTIME_SHA256_H_
#define JAX_FLASH_CUDA_RUNTIME_SHA256_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace jax_flash {

class Sha256 {
 public:
  // Adds a string and its length, so that ("ab", "c") and ("a", "bc") differ.
  Sha256& AddField(std::string_view text);
  Sha256& Add(std::string_view bytes);
  std::string Hex();  // 64 digits; call once, last

 private:
  void Block(const unsigned char* block);

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> pending_{};
  std::uint64_t size_ = 0;
};

}  // namespace jax_flash

#endif  // JAX_FLASH_CUDA_RUNTIME_SHA256_H_
