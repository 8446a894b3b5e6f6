// Loops over the elements of arrays, as one thread of many runs them. The same code runs on the host, in tests.
//
// A scalar head up to where all arrays are aligned to 16 bytes, a body of whole accesses, of 16 bytes where the
// elements are the widest, so that neighbouring threads always touch neighbouring memory; a scalar tail. Arrays that
// are never aligned together are gone through element by element. A functor is called with one element of each array
// and does the same arithmetic in each of the three, so the split has no part in the result.
#pragma once

#include <cstdint>
#include <cstring>

#include "zc/base/half.h"
#include "zc/base/host_device.h"

namespace zc::cuda {

inline constexpr int kAccessBytes = 16;  // the most that a thread reads or writes at once
inline constexpr int kMaxSources = 8;    // of InEach

// What functors get: In: const T&. InOut, Out: T&, and an Out holds nothing that may be read. InEach: const Each<T>&.
// None: Nothing&, for an array that is not there.
template <class T>
struct In {
  const T* data;
};
template <class T>
struct Out {
  T* data;
};
template <class T>
struct InOut {
  T* data;
};
template <class T>
struct InEach {
  const T* data[kMaxSources];
  int count;
};
struct None {};

// An element of each of the first `count` arrays.
template <class T>
struct Each {
  T values[kMaxSources];
  int count;
};
struct Nothing {};

// One access to global memory. Left to itself, nvcc takes some of these apart.
#if defined(__CUDA_ARCH__)
ZC_DEVICE inline void store_words(const std::uint32_t (&words)[4], void* to) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
ZC_DEVICE inline void store_words(const std::uint32_t (&words)[2], void* to) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]), "r"(words[1])
               : "memory");
}
#else
template <int kWords>
inline void store_words(const std::uint32_t (&words)[kWords], void* to) {
  std::memcpy(to, words, sizeof words);
}
#endif

// kVector consecutive elements in registers.
template <class T, int kVector>
struct Lanes {
  static constexpr int kAllBytes = kVector * static_cast<int>(sizeof(T));
  static constexpr int kBytes = kAllBytes < kAccessBytes ? kAllBytes : kAccessBytes;  // of an access
  static constexpr int kPerAccess = kBytes / static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes / 4;
  struct alignas(kBytes) Access {
    T lanes[kPerAccess];
  };
  Access accesses[kVector / kPerAccess];

  ZC_HOST_DEVICE void load(const T* from) {
    ZC_UNROLL
    for (int a = 0; a < kVector / kPerAccess; ++a) accesses[a] = reinterpret_cast<const Access*>(from)[a];
  }
  ZC_HOST_DEVICE void store(T* to) const {
    ZC_UNROLL
    for (int a = 0; a < kVector / kPerAccess; ++a) {
      std::uint32_t words[kWords];
      ZC_UNROLL
      for (int w = 0; w < kWords; ++w) words[w] = word(accesses[a].lanes + w * kPerAccess / kWords);
      store_words(words, to + a * kPerAccess);
    }
  }
  ZC_HOST_DEVICE T& operator[](int lane) { return accesses[lane / kPerAccess].lanes[lane % kPerAccess]; }

 private:
  ZC_HOST_DEVICE static std::uint32_t word(const float* lanes) { return float_bits(*lanes); }
  template <class Half>
  ZC_HOST_DEVICE static std::uint32_t word(const Half* lanes) {
    return lanes[0].bits | static_cast<std::uint32_t>(lanes[1].bits) << 16;
  }
};

// What for_each() needs to know of each kind of array: the size of its elements, its alignment, how one element is
// reached, and how kVector of them are held in registers.
template <class Array>
struct Access;

// Elements until `data` is aligned to 16 bytes.
template <class T>
ZC_HOST_DEVICE inline int elements_ahead(const T* data) {
  return static_cast<int>(-reinterpret_cast<std::uintptr_t>(data) % kAccessBytes / sizeof(T));
}

template <class T>
ZC_HOST_DEVICE inline bool aligned_after(const T* data, int numel) {
  return numel % (kAccessBytes / static_cast<int>(sizeof(T))) == elements_ahead(data);
}

template <class Array, class T, bool kReads, bool kWrites>
struct OneArrayAccess {
  static constexpr int kElementBytes = sizeof(T);
  ZC_HOST_DEVICE static int ahead(const Array& array) { return elements_ahead(array.data); }
  ZC_HOST_DEVICE static bool aligned(const Array& array, int numel) { return aligned_after(array.data, numel); }
  ZC_HOST_DEVICE static auto& element(const Array& array, std::int64_t i) { return array.data[i]; }

  template <int kVector>
  struct Registers {
    Array array;
    std::int64_t first;
    Lanes<T, kVector> lanes;

    ZC_HOST_DEVICE Registers(const Array& array, std::int64_t first) : array(array), first(first) {
      if constexpr (kReads) lanes.load(array.data + first);
    }
    ZC_HOST_DEVICE T& operator[](int lane) { return lanes[lane]; }
    ZC_HOST_DEVICE void store() const {
      if constexpr (kWrites) lanes.store(array.data + first);
    }
  };
};

template <class T>
struct Access<In<T>> : OneArrayAccess<In<T>, T, true, false> {};
template <class T>
struct Access<Out<T>> : OneArrayAccess<Out<T>, T, false, true> {};
template <class T>
struct Access<InOut<T>> : OneArrayAccess<InOut<T>, T, true, true> {};

template <class T>
struct Access<InEach<T>> {
  static constexpr int kElementBytes = sizeof(T);

  ZC_HOST_DEVICE static int ahead(const InEach<T>& array) { return elements_ahead(array.data[0]); }

  ZC_HOST_DEVICE static bool aligned(const InEach<T>& array, int numel) {
    bool all = true;
    ZC_UNROLL
    for (int k = 0; k < kMaxSources; ++k) all = all && (k >= array.count || aligned_after(array.data[k], numel));
    return all;
  }

  ZC_HOST_DEVICE static Each<T> element(const InEach<T>& array, std::int64_t i) {
    Each<T> each{};
    each.count = array.count;
    ZC_UNROLL
    for (int k = 0; k < kMaxSources; ++k) {
      if (k < array.count) each.values[k] = array.data[k][i];
    }
    return each;
  }

  template <int kVector>
  struct Registers {
    int count;
    Lanes<T, kVector> lanes[kMaxSources];

    ZC_HOST_DEVICE Registers(const InEach<T>& array, std::int64_t first) : count(array.count) {
      ZC_UNROLL
      for (int k = 0; k < kMaxSources; ++k) {
        if (k < count) lanes[k].load(array.data[k] + first);
      }
    }
    ZC_HOST_DEVICE Each<T> operator[](int lane) {
      Each<T> each{};
      each.count = count;
      ZC_UNROLL
      for (int k = 0; k < kMaxSources; ++k) {
        if (k < count) each.values[k] = lanes[k][lane];
      }
      return each;
    }
    ZC_HOST_DEVICE void store() const {}
  };
};

template <>
struct Access<None> {
  static constexpr int kElementBytes = 0;
  ZC_HOST_DEVICE static int ahead(None) { return 0; }
  ZC_HOST_DEVICE static bool aligned(None, int) { return true; }
  ZC_HOST_DEVICE static Nothing element(None, std::int64_t) { return {}; }

  template <int kVector>
  struct Registers {
    ZC_HOST_DEVICE Registers(None, std::int64_t) {}
    ZC_HOST_DEVICE Nothing operator[](int) { return {}; }
    ZC_HOST_DEVICE void store() const {}
  };
};

template <class... Rest>
ZC_HOST_DEVICE constexpr int most(int first, Rest... rest) {
  ((first = rest > first ? rest : first), ...);
  return first;
}

template <int kVector, class Functor, class... Registers>
ZC_HOST_DEVICE inline void each_lane(const Functor& functor, Registers... registers) {
  ZC_UNROLL
  for (int lane = 0; lane < kVector; ++lane) functor(registers[lane]...);
  (registers.store(), ...);
}

// What thread `thread` of num_threads does of: for i in [0, numel): functor(arrays[i]...).
template <class Functor, class... Arrays>
ZC_HOST_DEVICE inline void for_each(std::int64_t thread, std::int64_t num_threads, std::int64_t numel,
                                    const Functor& functor, const Arrays&... arrays) {
  constexpr int kVector = kAccessBytes / most(Access<Arrays>::kElementBytes...);
  int ahead = 0;
  ((ahead = Access<Arrays>::ahead(arrays) > ahead ? Access<Arrays>::ahead(arrays) : ahead), ...);
  const bool together = (Access<Arrays>::aligned(arrays, ahead) && ...);
  const std::int64_t head = together && ahead < numel ? ahead : numel;
  const std::int64_t vectors = (numel - head) / kVector;

  ZC_UNROLL_BY(1)
  for (std::int64_t i = thread; i < head; i += num_threads) functor(Access<Arrays>::element(arrays, i)...);
  ZC_UNROLL_BY(1)
  for (std::int64_t v = thread; v < vectors; v += num_threads) {
    each_lane<kVector>(functor, typename Access<Arrays>::template Registers<kVector>(arrays, head + v * kVector)...);
  }
  ZC_UNROLL_BY(1)
  for (std::int64_t i = head + vectors * kVector + thread; i < numel; i += num_threads) {
    functor(Access<Arrays>::element(arrays, i)...);
  }
}

}  // namespace zc::cuda
