
#include <cmath>
#include <deque>

#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/io/files.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"
#include "test/support/toy_checkpoint.h"

namespace {

template <class T> std::vector<T> values_of(const Safetensors::Entry& tensor) {
    std::vector<T> values(tensor.bytes / sizeof(T));
    if (tensor.bytes) std::memcpy(values.data(), tensor.data, tensor.bytes);
    return values;
}

// An FP32 tensor whose bytes count up from `start`, in memory that lives until the tests end.
NamedTensor counting(const std::string& name, std::vector<size_t> shape, unsigned start) {
    static std::deque<std::vector<unsigned char>> memory;
    NamedTensor tensor{name, std::move(shape)};
    tensor.count = elements_of(tensor);
    std::vector<unsigned char>& bytes = memory.emplace_back(bytes_of(tensor));
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<unsigned char>(start + i);
    tensor.values.data = bytes.data();
    return tensor;
}

bool counts_up(const Safetensors::Entry& tensor, unsigned start) {
    for (size_t i = 0; i < tensor.bytes; i++)
        if (tensor.data[i] != std::byte(start + i)) return false;
    return true;
}

std::string file_of(uint64_t header_length, const std::string& rest) {
    return std::string(reinterpret_cast<const char*>(&header_length), 8) + rest;
}
std::string file_of(const std::string& header, size_t data_bytes) {
    return file_of(header.size(), header + std::string(data_bytes, 'x'));
}

// The header of one tensor "w" of four bytes, with parts replaced.
std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}
std::string header(const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"w\":" + entry(dtype, shape, offsets) + "}";
}
std::string two(const std::string& first, const std::string& second) {
    return "{\"a\":" + entry("\"U8\"", "[4]", first) + ",\"b\":" + entry("\"U8\"", "[4]", second) + "}";
}

}  // namespace

TEST_CASE("safetensors written by Python are read") {
    Safetensors file("test/recorded/safetensors/from_python.safetensors");
    CHECK(file.entries().size() == 8);
    CHECK(values_of<float>(file.at("float", {2, 3})) == std::vector<float>{-1, -0.75f, -0.5f, -0.25f, 0, 0.25f});
    CHECK(values_of<uint16_t>(file.at("half", {3})) == std::vector<uint16_t>{0x3800, 0xc000, 0x7bff});
    CHECK(values_of<uint16_t>(file.at("brain", {3})) == std::vector<uint16_t>{0x3f80, 0xc000, 0x7f80});
    CHECK(values_of<int64_t>(file.at("wide", {2})) == std::vector<int64_t>{-1, int64_t(1) << 62});
    CHECK(values_of<uint8_t>(file.at("bytes", {2, 1})) == std::vector<uint8_t>{1, 255});
    CHECK(values_of<uint8_t>(file.at("flag", {})) == std::vector<uint8_t>{1});
    CHECK(file.at("nothing", {0, 4}).bytes == 0);
    CHECK(values_of<double>(file.at("größe", {1, 1, 1})) == std::vector<double>{1.0 / 3});
    CHECK(file.at("brain").type == "BF16");
    CHECK(file.at("flag").type == "BOOL");
    CHECK(file.at("float").file == "test/recorded/safetensors/from_python.safetensors");
    CHECK(file.find("flaot") == nullptr);
    expect_error(Exit::data, {"from_python.safetensors", "no tensor flaot"}, [&] { file.at("flaot"); });
    expect_error(Exit::data, {"from_python.safetensors", "float", "(2, 3)", "(3, 2)"}, [&] {
        file.at("float", {3, 2});
    });
}

TEST_CASE("an FP64 value that FP32 cannot represent is an error, an infinity is not") {
    TemporaryDirectory directory;
    const std::string path = directory / "wide.safetensors", wide = header("\"F64\"", "[2]", "[0,16]");
    auto read = [&](double second) {
        const double values[] = {-1.5, second};
        write_file_atomically(path,
                              file_of(wide.size(), wide + std::string(reinterpret_cast<const char*>(values), 16)));
        return Safetensors(path).at("w").floats();
    };
    CHECK(read(3e38) == std::vector<float>{-1.5f, 3e38f});
    CHECK(std::isinf(read(HUGE_VAL)[1]));
    expect_error(Exit::data, {"wide.safetensors", "element 1 of w", "1e+39", "FP32"}, [&] { read(1e39); });
}

TEST_CASE("safetensors of any size are read back unchanged") {
    TemporaryDirectory directory;
    std::string path = directory / "model.safetensors";
    write_safetensors(path, {counting("odd", {3}, 1), counting("large", {1'500'007}, 2), counting("scalar", {}, 3),
                             counting("none", {5, 0}, 4)});
    Safetensors file(directory.path());
    CHECK(file.entries().size() == 4);
    for (const Safetensors::Entry& tensor : file.entries()) CHECK(tensor.file == path);
    CHECK(counts_up(file.at("odd", {3}), 1));
    CHECK(counts_up(file.at("large", {1'500'007}), 2));
    CHECK(counts_up(file.at("scalar", {}), 3));
    CHECK(file.at("none", {5, 0}).bytes == 0);
    for (const Safetensors::Entry& tensor : file.entries()) {
        INFO(tensor.name);
        CHECK(reinterpret_cast<uintptr_t>(tensor.data) % sizeof(float) == 0);
    }
    std::string content = read_file(path);
    uint64_t length;
    std::memcpy(&length, content.data(), 8);
    CHECK(length % 8 == 0);
    CHECK_THAT(content.substr(8, length), StartsWith(R"({"__metadata__":{"format":"pt"})"));
    CHECK(list_directory(directory.path()) == std::vector<std::string>{"model.safetensors"});
}

TEST_CASE("safetensors in bf16 are rounded to nearest even") {
    TemporaryDirectory directory;
    std::vector<uint32_t> bits = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f80ffff,
                                  0xbf818000, 0x7f7fffff, 0x80000001, 0x00018000};
    NamedTensor tensor{"w", {bits.size()}};
    tensor.count = bits.size();
    tensor.values.data = reinterpret_cast<std::byte*>(bits.data());
    write_safetensors(directory / "m.safetensors", {tensor}, Dtype::bf16);
    const Safetensors file(directory / "m.safetensors");
    CHECK(values_of<uint16_t>(file.at("w")) ==
          std::vector<uint16_t>{0x3f80, 0x3f82, 0x3f81, 0x3f81, 0xbf82, 0x7f80, 0x8000, 0x0002});
}

TEST_CASE("a safetensors file that cannot be completed leaves the older file") {
    TemporaryDirectory directory;
    std::string path = directory / "model.safetensors";
    write_safetensors(path, {counting("w", {4}, 1)});
    std::string before = read_file(path);
    NamedTensor failing = counting("w", {3}, 2);
    failing.values.data = nullptr;  // detected after the previous tensor has been written
    expect_error(Exit::internal, {"tensor w is not completely on this rank"}, [&] {
        write_safetensors(path, {counting("v", {3'000'000}, 2), failing});
    });
    failing = counting("w", {3}, 2);
    failing.count = 2;
    expect_error(Exit::internal, {"tensor w is not completely on this rank"},
                 [&] { write_safetensors(path, {failing}); });
    expect_error(Exit::internal, {"w", "twice"}, [&] {
        write_safetensors(path, {counting("w", {4}, 1), counting("w", {4}, 1)});
    });
    NamedTensor huge{"w", {size_t(1) << 40, size_t(1) << 40}};
    expect_error(Exit::data, {"w", "63 bits"}, [&] { write_safetensors(path, {huge}); });
    CHECK(read_file(path) == before);
    CHECK(list_directory(directory.path()) == std::vector<std::string>{"model.safetensors"});
}

TEST_CASE("hostile safetensors files are rejected") {
    struct Case {
        std::string content;
        const char* words;  // in the error message
    };
    const std::string deep = "{\"w\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}";
    const Case cases[] = {
        {"", "has 0 bytes"},
        {"1234567", "has 7 bytes"},
        {file_of(uint64_t(0), ""), "not a complete safetensors file"},
        {file_of(uint64_t(1), "{"), "not a complete safetensors file"},
        {file_of(uint64_t(3), "{}"), "claims a header of 3"},
        {file_of(~uint64_t(0), "{}"), "18446744073709551615"},
        {"<!DOCTYPE html><html><body>404</body></html>", "an HTML page"},
        {"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a Git LFS pointer"},
        {file_of("[]", 0), "not a complete safetensors file"},
        {file_of(" {}", 0), "not a complete safetensors file"},
        {file_of("{]", 0), "line 1"},
        {file_of("{}x", 0), "line 1"},
        {file_of("{\"\xff\":1}", 0), "header"},
        {file_of(deep, 0), "header"},
        {file_of("{}", 1), "tensors end at 10"},
        {file_of("{\"w\":1}", 0), "must be an object"},
        {file_of("{\"w\":{}}", 0), "dtype is missing"},
        {file_of("{\"w\":{\"dtype\":\"U8\"}}", 0), "shape is missing"},
        {file_of("{\"w\":{\"dtype\":\"U8\",\"shape\":[]}}", 1), "data_offsets is missing"},
        {file_of(header("\"U9\"", "[4]", "[0,4]"), 4), "U9"},
        {file_of(header("\"\\u001b[31m\"", "[4]", "[0,4]"), 4), "\\u001b"},
        {file_of(header("8", "[4]", "[0,4]"), 4), "dtype must be a string, is 8"},
        {file_of(header("\"U8\"", "4", "[0,4]"), 4), "shape must be a list"},
        {file_of(header("\"U8\"", "[-4]", "[0,4]"), 4), "-4"},
        {file_of(header("\"U8\"", "[4.0]", "[0,4]"), 4), "4.0"},
        {file_of(header("\"U8\"", "[\"4\"]", "[0,4]"), 4), "\"4\""},
        {file_of(header("\"U8\"", "[18446744073709551616]", "[0,4]"), 4), "shape[0] must be an integer from 0"},
        {file_of(header("\"U8\"", "[4294967296,4294967297]", "[0,4294967296]"), 4), "overflows"},
        {file_of(header("\"F32\"", "[4611686018427387905]", "[0,4]"), 4), "overflows"},
        {file_of(header("\"U8\"", "[5]", "[0,4]"), 4), "5 bytes"},
        {file_of(header("\"F32\"", "[4]", "[0,4]"), 4), "16 bytes"},
        {file_of(header("\"U8\"", "[4]", "[4,0]"), 4), "[4, 0]"},
        {file_of(header("\"U8\"", "[4]", "[-4,0]"), 4), "-4"},
        {file_of(header("\"U8\"", "[4]", "[0]"), 4), "two numbers"},
        {file_of(header("\"U8\"", "[4]", "[0,4,4]"), 4), "two numbers"},
        {file_of(header("\"U8\"", "[4]", "[0,4]"), 3), "end of the file"},
        {file_of(header("\"U8\"", "[4]", "[0,4]"), 5), "tensors end at"},
        {file_of(header("\"U8\"", "[4]", "[1,5]"), 5), "must begin at 0"},
        {file_of(header("\"U8\"", "[4]", "[18446744073709551612,18446744073709551615]"), 4), "is 18446744073709551612"},
        {file_of(header("\"U8\"", "[9223372036854775807]", "[0,9223372036854775807]"), 4), "end of the file"},
        {file_of("{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}", 1),
         "has 4 keys, only 3 known"},
        {file_of(two("[0,4]", "[0,4]"), 4), "must begin at 4"},
        {file_of(two("[0,4]", "[2,6]"), 6), "must begin at 4"},
        {file_of(two("[0,4]", "[6,10]"), 10), "must begin at 4"},
        {file_of("{\"a\":" + entry("\"U8\"", "[1]", "[0,1]") + ",\"a\":" + entry("\"U8\"", "[1]", "[1,2]") + "}", 2),
         "a"},
        {file_of("{\"\":" + entry("\"U8\"", "[1]", "[0,1]") + "}", 1), "name"},
        {file_of("{\"a\\nb\":" + entry("\"U8\"", "[1]", "[0,1]") + "}", 1), "control"},
        {file_of("{\"a\\u0000b\":" + entry("\"U8\"", "[1]", "[0,1]") + "}", 1), "control"},
        {file_of("{\"__metadata__\":{\"n\":1}}", 0), "__metadata__"},
        {file_of("{\"__metadata__\":[\"n\"]}", 0), "__metadata__"},
    };
    TemporaryDirectory directory;
    std::string path = directory / "hostile.safetensors";
    for (const Case& c : cases) {
        INFO(c.content.substr(0, 200));
        overwrite(path, c.content);
        expect_error(Exit::data, {path, c.words}, [&] { Safetensors file(path); });
    }
    overwrite(path, file_of(uint64_t(100'000'001), "{}"));
    std::filesystem::resize_file(path, 200'000'000);  // large enough, but the header exceeds the limit
    expect_error(Exit::data, {path, "claims a header of 100000001"}, [&] { Safetensors file(path); });
    overwrite(path, file_of(two("[4,8]", "[0,4]") + "   ", 8));  // padded and in another order than the data: valid
    Safetensors file(path);
    CHECK(file.entries()[0].name == "b");
}

TEST_CASE("a safetensors file truncated to any length is rejected") {
    TemporaryDirectory directory;
    std::string path = directory / "cut.safetensors",
                content = read_file("test/recorded/safetensors/from_python.safetensors");
    size_t accepted = 0;
    for (size_t length = 0; length < content.size(); length++) {
        overwrite(path, content.substr(0, length));
        try {
            Safetensors file(path);
            accepted++;
        } catch (const Error& error) {
            accepted += error.code != Exit::data;
        }
    }
    CHECK(accepted == 0);
}

TEST_CASE("sharded safetensors contain exactly the tensors of their index") {
    TemporaryDirectory directory;
    std::string index = directory / "model.safetensors.index.json";
    write_safetensors(directory / "one.safetensors", {counting("a", {2}, 1), counting("b", {2}, 2)});
    write_safetensors(directory / "two.safetensors", {counting("c", {2}, 3)});
    auto open = [&](const std::string& weight_map) {
        overwrite(index, "{\"metadata\":{\"total_size\":24},\"weight_map\":" + weight_map + "}");
        return Safetensors(directory.path());
    };
    const std::string whole = R"({"a":"one.safetensors","b":"one.safetensors","c":"two.safetensors"})";
    Safetensors sound = open(whole);
    CHECK(sound.entries().size() == 3);
    CHECK(counts_up(sound.at("c", {2}), 3));
    CHECK(sound.at("c").file == directory / "two.safetensors");

    auto refused = [&](const std::string& weight_map, const std::string& words, Exit code = Exit::data) {
        INFO(weight_map);
        expect_error(code, {directory.path(), words}, [&] { open(weight_map); });
    };
    refused(R"({"a":"one.safetensors","c":"two.safetensors"})", "tensor b, which");
    refused(R"({"a":"one.safetensors","b":"two.safetensors","c":"two.safetensors"})", "must be in two.safetensors");
    refused(R"({"a":"one.safetensors","b":"one.safetensors","c":"two.safetensors","d":"two.safetensors"})", "tensor d");
    refused(R"({"a":"gone.safetensors"})", "gone.safetensors", Exit::no_input);
    refused(R"({"a":1})", "weight_map");
    refused(R"([])", "weight_map");
    refused(R"({"a\n":"one.safetensors"})", "control");
    for (const char* name : {"../one.safetensors", "/etc/one.safetensors", "./one.safetensors", "x/one.safetensors",
                             "..", "", "one.bin", "a\\\\b.safetensors", ".one.safetensors", "a\\u0000.safetensors"})
        refused("{\"a\":\"" + std::string(name) + "\"}", "not a plain file name");

    write_safetensors(directory / "again.safetensors", {counting("c", {2}, 3)});
    refused(R"({"a":"one.safetensors","b":"one.safetensors","c":"two.safetensors","d":"again.safetensors"})",
            "tensor c is also in");
    std::filesystem::create_symlink("one.safetensors", directory / "link.safetensors");
    refused(R"({"a":"link.safetensors"})", "/link.safetensors must be a regular file, not a link");
    std::filesystem::create_directory(directory / "dir.safetensors");
    refused(R"({"a":"dir.safetensors"})", "/dir.safetensors must be a regular file");

    TemporaryDirectory empty;
    expect_error(Exit::no_input, {empty.path(), "model.safetensors"}, [&] { Safetensors file(empty.path()); });
    expect_error(Exit::no_input, {"absent"}, [&] { Safetensors file(empty / "absent"); });
}
