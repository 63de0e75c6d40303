// Arrays for tests of ops: device memory between guards, and the host twin for ref::.
//
// A test creates its arrays, describes the op once as a function of the side, and runs it on both sides:
//
//     Stored<T> out("out", Role::output, nans(count));
//     auto op = [&]<class Side>(Side side) { return ops::Cast{.out = out.on(side), ...}; };
//     ops::cast(op(OnDevice<T>()), Stream());
//     ref::cast(op(OnHost()));
//     check_close(out, [&](size_t i) { return stored_error<T>(out.host[i]); });
#pragma once

#include <cstring>

#include "kernels/base/check.h"
#include "kernels/device.h"
#include "test/reference/reference.h"
#include "test/simt/sanitizers.h"
#include "test/support/catch.h"

// On the host, activations and weights are double, so that ref:: does not round them.
struct OnHost {
    using Storage = double;
};
template <class T> struct OnDevice { using Storage = T; };

// The guard bytes around an array. Reading past the edge of an input gives NaN (an index of -1). Writing or adding past
// the edge of an output changes the guard, which must be small and finite, since NaN + 1 has the bits of NaN. Where
// device memory is host memory, AddressSanitizer also finds a read whose value is not used: the guards are poisoned
// except while their bytes are set or compared.
enum class Role : unsigned char { input = 0xff, output = 0xa5 };

// T on the device, Host on the host. Given values are rounded to T on both sides. The array begins `shift` elements
// after an address of device_alloc's alignment: 0 for the trainer's large arrays, 1 for example for the second layer of
// an odd-sized array.
template <class T, class Host = T> class Array {
public:
    std::vector<Host> host;

    template <class Value>
    Array(const char* name, Role role, const std::vector<Value>& values, int shift = 0)
        : host(values.size()),
          name_(name),
          role_(role),
          begin_(kGuardBytes + size_t(shift) * sizeof(T)),
          bytes_(values.size() * sizeof(T)) {
        std::vector<T> rounded(values.size());
        for (size_t i = 0; i < values.size(); i++) {
            rounded[i] = converted<T>(values[i]);
            host[i] = converted<Host>(rounded[i]);
        }
        auto bytes = reinterpret_cast<const unsigned char*>(rounded.data());
        std::vector<unsigned char> image(begin_, static_cast<unsigned char>(role));
        image.insert(image.end(), bytes, bytes + bytes_);
        image.insert(image.end(), kGuardBytes, static_cast<unsigned char>(role));
        memory_ = DeviceBuffer(image.size());
        copy_to_device(memory_.data(), image.data(), image.size(), Stream());
        synchronize(Stream());
        poison_guards();
    }
    ~Array() { unpoison_guards(); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    const char* name() const { return name_; }
    Host* on(OnHost) { return host.data(); }
    template <class Storage> T* on(OnDevice<Storage>) {
        return reinterpret_cast<T*>(static_cast<char*>(memory_.data()) + begin_);
    }

    // The device's values. Fails the test if the guards around the array have changed.
    std::vector<T> fetch() const {
        std::vector<unsigned char> image(memory_.bytes());
        synchronize(Stream());
        unpoison_guards();
        copy_to_host(image.data(), memory_.data(), image.size(), Stream());
        synchronize(Stream());
        poison_guards();
        auto changed = [&](unsigned char byte) { return byte != static_cast<unsigned char>(role_); };
        auto array = image.begin() + ptrdiff_t(begin_), end = array + ptrdiff_t(bytes_);
        INFO("memory around " << name_);
        CHECK(std::count_if(image.begin(), array, changed) == 0);
        CHECK(std::count_if(end, image.end(), changed) == 0);
        std::vector<T> values(host.size());
        std::copy(array, end, reinterpret_cast<unsigned char*>(values.data()));
        return values;
    }

private:
    static constexpr size_t kGuardBytes = 1024;  // a multiple of device_alloc's alignment, so the array has it too

    template <class To, class From> static To converted(From value) {
        if constexpr (std::is_same_v<To, From>)
            return value;
        else if constexpr (std::is_same_v<To, bf16> || std::is_same_v<To, fp16>)
            return ref::store<To>(value);
        else if constexpr (std::is_same_v<From, bf16> || std::is_same_v<From, fp16>)
            return To(ref::load(value));
        else
            return To(value);
    }

    const char* accessed_memory() const {
        return static_cast<const char*>(simt_on_device ? simt_on_device(memory_.data()) : memory_.data());
    }
    void poison_guards() const {
        const char* const memory = accessed_memory();
        simt::poison(memory, begin_);
        simt::poison(memory + begin_ + bytes_, kGuardBytes);
    }
    void unpoison_guards() const { simt::unpoison(accessed_memory(), memory_.bytes()); }

    const char* name_;
    Role role_;
    size_t begin_;  // of the array in memory, in bytes
    size_t bytes_;
    DeviceBuffer memory_;
};

// Activations and weights.
template <class T> using Stored = Array<T, double>;

inline std::vector<double> nans(size_t count) { return std::vector<double>(count, NAN); }

// Scratch is filled with NaN before the op uses it.
inline Array<unsigned char> scratch_of(size_t bytes) {
    return {"scratch", Role::output, std::vector<unsigned char>(bytes, 0xff)};
}

// Every value must be within bound(i) of its expected one. NaN never is; equal infinities are.
template <class T, class Host, class Bound>
void check_close(const char* name, const std::vector<T>& values, const std::vector<Host>& host, Bound bound) {
    REQUIRE(values.size() == host.size());
    size_t i = 0;
    for (; i < values.size(); i++) {
        double value = ref::load(values[i]), expected = host[i];
        if (!(value == expected || std::abs(value - expected) <= bound(i))) break;
    }
    std::string difference;
    if (i < values.size())
        difference = format("%s[%zu] is %.9g, should be %.9g within %.3g", name, i, double(ref::load(values[i])),
                            double(host[i]), double(bound(i)));
    INFO(difference);
    CHECK(difference.empty());
}

// The same for an array on the device and its host twin.
template <class T, class Host, class Bound> void check_close(const Array<T, Host>& array, Bound bound) {
    check_close(array.name(), array.fetch(), array.host, bound);
}

// The array on the device must have exactly these bits.
template <class T, class Host> void check_same_bits(const Array<T, Host>& array, const std::vector<T>& expected) {
    std::vector<T> values = array.fetch();
    REQUIRE(values.size() == expected.size());
    size_t i = 0;
    while (i < values.size() && std::memcmp(&values[i], &expected[i], sizeof(T)) == 0) i++;
    INFO(array.name() << "[" << i << "] of " << values.size());
    CHECK(i == values.size());
}

template <class V> bool have_same_bits(const std::vector<V>& a, const std::vector<V>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(V)) == 0;
}
