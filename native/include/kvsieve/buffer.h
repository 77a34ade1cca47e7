// Memory aligned for the widest vectors, growing only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace kvsieve {

template <class T>
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { release(); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Room for `count` elements; contents are lost when it grows.
  void reserve(size_t count) {
    if (count <= count_) return;
    release();
    data_ = static_cast<T*>(::operator new(count * sizeof(T), kAlign));
    count_ = count;
  }
  T* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlign{64};
  void release() {
    if (data_) ::operator delete(data_, kAlign);
    data_ = nullptr;
    count_ = 0;
  }
  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace kvsieve
