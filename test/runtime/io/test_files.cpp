// Files: inputs are regular files, outputs are complete or absent, and no write goes through a link.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "runtime/io/process.h"
#include "test/support/expect_error.h"
#include "test/support/system_faults.h"
#include "test/support/temporary_directory.h"

using namespace std::string_literals;

namespace {

void put(const std::string& path, const std::string& content) { std::ofstream(path) << content; }

mode_t mode_of(const std::string& path) {
    struct stat status {};
    REQUIRE(::stat(path.c_str(), &status) == 0);
    return status.st_mode & 0777;
}

// Runs the action in a child process whose files may have at most `bytes`, as on a full disk. Returns the exit code
// that main() would return, or 0.
template <class Action> int with_file_size_limit(size_t bytes, Action action) {
    const pid_t child = ::fork();
    if (child == 0) {
        const rlimit limit{bytes, bytes};
        std::signal(SIGXFSZ, SIG_IGN);
        ::setrlimit(RLIMIT_FSIZE, &limit);
        int code = 0;
        try {
            action();
        } catch (const Error& error) {
            code = int(error.code);
        }
        ::_exit(code);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("read_file and MappedFile return a file's bytes", "[files]") {
    TemporaryDirectory directory;
    for (const std::string& content : {""s, "x"s, "a\0b\n"s, std::string(1 << 20, 'y')}) {
        put(directory / "file", content);
        CHECK(read_file(directory / "file") == content);
        const MappedFile mapped(directory / "file");
        CHECK(mapped.text() == content);
        CHECK(mapped.size() == content.size());
        CHECK(mapped.path() == directory / "file");
    }
    MappedFile first(directory / "file"), second;
    second = std::move(first);
    CHECK(second.size() == 1 << 20);
    CHECK(MappedFile(std::move(second)).text()[5] == 'y');
    ::symlink((directory / "file").c_str(), (directory / "link").c_str());
    CHECK(MappedFile(directory / "link").size() == 1 << 20);
}

TEST_CASE("an input file is read by position and reports changes", "[files]") {
    TemporaryDirectory directory;
    const std::string path = directory / "file";
    put(path, "0123456789");
    const InputFile file(path);
    const InputFile copy = file;
    std::string part(4, '?');
    copy.read_at(3, part.data(), 4);
    CHECK(part == "3456");
    CHECK(file.size() == 10);
    copy.read_at(10, part.data(), 0);
    CHECK_THROWS_AS(file.read_at(7, part.data(), 4), Error);  // an error of the caller
    file.check_unchanged();

    SECTION("cut") {
        std::filesystem::resize_file(path, 5);
        expect_error(Exit::data, {path, "offset 5", "10 bytes"}, [&] { file.read_at(3, part.data(), 4); });
        expect_error(Exit::data, {path, "5 bytes", "had 10"}, [&] { file.check_unchanged(); });
    }
    SECTION("written to in place, with the same size") {
        const timespec times[2] = {{1, 0}, {1, 5}};
        ::utimensat(AT_FDCWD, path.c_str(), times, 0);
        expect_error(Exit::data, {path, "written to"}, [&] { file.check_unchanged(); });
    }
    SECTION("replaced by another, which reads do not see") {
        put(directory / "other", "9876543210");
        std::filesystem::rename(directory / "other", path);
        copy.read_at(3, part.data(), 4);
        CHECK(part == "3456");
        expect_error(Exit::data, {path, "replaced"}, [&] { file.check_unchanged(); });
    }
    SECTION("removed") {
        std::filesystem::remove(path);
        expect_error(Exit::no_input, {path, "No such file"}, [&] { file.check_unchanged(); });
    }
}

TEST_CASE("a page of a mapped file that cannot be read ends the process with an error message", "[files]") {
    TemporaryDirectory directory;
    const std::string path = directory / "file", said = directory / "said";
    put(path, std::string(100'000, 'x'));
    const pid_t child = ::fork();
    if (child == 0) {
        std::freopen(said.c_str(), "w", stderr);
        { const MappedFile gone(path); }
        const MappedFile file(path), other(directory / "file");
        std::filesystem::resize_file(path, 10'000);
        ::_exit(file.text()[70'000]);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == int(Exit::io));
    CHECK_THAT(read_file(said), ContainsSubstring("cannot read " + path + " at offset 70000"));
}

TEST_CASE("temporary files of a killed process are removed", "[files]") {
    TemporaryDirectory directory;
    for (const char* name : {"a.json.tmp.0123456789abcdef", "a.json", "a.tmp.0123456789abcdeF", ".tmp.0123456789abcdef",
                             "a.tmp.0123456789abcde", "tmp.0123456789abcdef"})
        put(directory / name, "x");
    remove_temporary_files(directory.path());
    const std::vector<std::string> left = list_directory(directory.path());
    CHECK(left.size() == 5);
    CHECK(std::ranges::count(left, "a.json.tmp.0123456789abcdef") == 0);
}

TEST_CASE("anything but a regular file is rejected at once, by name", "[files]") {
    TemporaryDirectory directory;
    const std::string fifo = directory / "fifo", loop = directory / "loop", dangling = directory / "dangling";
    ::mkfifo(fifo.c_str(), 0600);
    ::symlink("loop", loop.c_str());
    ::symlink("nowhere", dangling.c_str());
    put(directory / "file", "12345");
    struct Case {
        std::string path;
        Exit code;
        const char* word;
    };
    for (const Case& c :
         {Case{directory / "absent", Exit::no_input, "No such file"}, Case{fifo, Exit::no_input, "a FIFO"},
          Case{directory.path(), Exit::no_input, "a directory"}, Case{"/dev/null", Exit::no_input, "a device"},
          Case{directory / "file/x", Exit::no_input, "Not a directory"}, Case{"", Exit::no_input, "No such file"},
          Case{dangling, Exit::no_input, "No such file"}, Case{loop, Exit::io, "symbolic links"},
          Case{directory / std::string(300, 'n'), Exit::io, "too long"}}) {
        expect_error(c.code, {c.path, c.word}, [&] { read_file(c.path); });
        expect_error(c.code, {c.path, c.word}, [&] { MappedFile{c.path}; });
        expect_error(c.code, {c.path, c.word}, [&] { InputFile{c.path}; });
    }
    CHECK(read_file(directory / "file", 5) == "12345");
    expect_error(Exit::data, {"file", "5 bytes", "at most 4"}, [&] { read_file(directory / "file", 4); });
}

TEST_CASE("an output file is new, private, never a link, and exactly as long as the data written", "[files]") {
    TemporaryDirectory directory;
    const std::string path = directory / "out";
    {
        OutputFile file(path, 1 << 16);
        file.append("abc");
        file.write_at(6, "gh", 2);
        CHECK(file.size() == 8);
        file.append("ij");
        file.write_at(3, "def", 3);
        CHECK(file.size() == 10);
        file.sync();
        file.close();
        file.close();
        expect_error(Exit::internal, {path}, [&] { file.append("k"); });
    }
    CHECK(read_file(path) == "abcdefghij");
    expect_error(Exit::cannot_create, {path, "exists"}, [&] { OutputFile{path}; });
    CHECK(read_file(path) == "abcdefghij");

    const std::string link = directory / "link", target = directory / "target";
    ::symlink(target.c_str(), link.c_str());
    expect_error(Exit::cannot_create, {link}, [&] { OutputFile{link}; });
    CHECK_FALSE(file_exists(target));
    expect_error(Exit::cannot_create, {directory / "no/such"}, [&] { OutputFile{directory / "no/such"}; });
}

TEST_CASE("open_to_continue cuts a file and continues there", "[files]") {
    TemporaryDirectory directory;
    const std::string path = directory / "log";
    OutputFile{path}.append("one\ntorn");
    {
        OutputFile file = OutputFile::open_to_continue(path, 4);
        CHECK(file.size() == 4);
        file.append("two\n");
        OutputFile moved = std::move(file);
        moved.append("three\n");
    }
    CHECK(read_file(path) == "one\ntwo\nthree\n");
    expect_error(Exit::data, {path, "14 bytes", "15 were written"}, [&] { OutputFile::open_to_continue(path, 15); });
    ::mkfifo((directory / "fifo").c_str(), 0600);
    expect_error(Exit::io, {"fifo"}, [&] { OutputFile::open_to_continue(directory / "fifo", 0); });
    expect_error(Exit::data, {"/dev/null", "a device"}, [] { OutputFile::open_to_continue("/dev/null", 0); });
}

TEST_CASE("write_file_atomically replaces the whole file or leaves it unchanged, without temporary files", "[files]") {
    TemporaryDirectory directory;
    const std::string path = directory / "file";
    write_file_atomically(path, "first");
    write_file_atomically(path, "second, longer");
    CHECK(read_file(path) == "second, longer");

    const std::string large(1 << 20, 'x');
    CHECK(with_file_size_limit(1 << 16, [&] { write_file_atomically(path, large); }) == int(Exit::io));
    CHECK(read_file(path) == "second, longer");
    CHECK(list_directory(directory.path()) == std::vector<std::string>{"file"});

    ::mkdir((directory / "sub").c_str(), 0700);
    expect_error(Exit::cannot_create, {directory / "sub"}, [&] { write_file_atomically(directory / "sub", "x"); });
    CHECK(list_directory(directory.path()) == std::vector<std::string>{"file", "sub"});

    // Replaces a link but does not change its target.
    ::symlink("file", (directory / "link").c_str());
    write_file_atomically(directory / "link", "third");
    CHECK(read_file(path) == "second, longer");
    CHECK(read_file(directory / "link") == "third");
}

TEST_CASE("the umask determines the permissions of written files", "[files]") {
    const mode_t before = ::umask(0);
    for (const mode_t mask : {0022, 0002, 0077}) {
        INFO("umask " << std::oct << mask);
        TemporaryDirectory directory;
        ::umask(mask);
        make_directories(directory / "sub/folder");
        OutputFile{directory / "new"};
        write_file_atomically(directory / "whole", "first");
        write_file_atomically(directory / "whole", "second");
        ::umask(before);
        for (const char* name : {"sub", "sub/folder"}) CHECK(mode_of(directory / name) == (0777 & ~mask));
        for (const char* name : {"new", "whole"}) CHECK(mode_of(directory / name) == (0666 & ~mask));
    }
}

TEST_CASE("a full disk is an error with the sizes, and reserving space detects it early", "[files]") {
    TemporaryDirectory directory;
    CHECK(with_file_size_limit(1000, [&] { OutputFile(directory / "a").append(std::string(1000, 'x')); }) == 0);
    CHECK(with_file_size_limit(1000, [&] { OutputFile(directory / "b").append(std::string(1001, 'x')); }) ==
          int(Exit::io));
    CHECK(read_file(directory / "b") == std::string(1000, 'x'));  // the error follows a short write
    expect_error(Exit::io, {"reserve", "4611686018427387904 bytes", directory / "c"},
                 [&] { OutputFile(directory / "c", size_t(1) << 62); });
    CHECK_FALSE(file_exists(directory / "c"));
}

TEST_CASE("directories are made, listed in order, renamed and removed", "[files]") {
    TemporaryDirectory directory;
    make_directories(directory / "a/b/c");
    make_directories(directory / "a/b/c/");
    for (const char* name : {"z", "B", "a", "10", "9"}) put(directory / ("a/"s + name), "");
    CHECK(list_directory(directory / "a") == std::vector<std::string>{"10", "9", "B", "a", "b", "z"});
    CHECK(directory_exists(directory / "a"));
    CHECK_FALSE(file_exists(directory / "a"));
    CHECK(file_exists(directory / "a/z"));
    CHECK_NOTHROW(sync_directory(directory / "a"));

    expect_error(Exit::cannot_create, {directory / "a/z"}, [&] { make_directories(directory / "a/z/y"); });
    expect_error(Exit::no_input, {directory / "none"}, [&] { list_directory(directory / "none"); });
    expect_error(Exit::no_input, {directory / "a/z"}, [&] { list_directory(directory / "a/z"); });
    expect_error(Exit::no_input, {directory / "none"}, [&] { sync_directory(directory / "none"); });
    expect_error(Exit::cannot_create, {directory / "none", directory / "other"},
                 [&] { rename_path(directory / "none", directory / "other"); });

    rename_path(directory / "a", directory / "moved");
    CHECK(file_exists(directory / "moved/z"));
    put(directory / "kept", "x");
    ::symlink((directory / "kept").c_str(), (directory / "moved/link").c_str());
    remove_tree(directory / "moved");
    CHECK(list_directory(directory.path()) == std::vector<std::string>{"kept"});
    CHECK_NOTHROW(remove_tree(directory / "moved"));
    CHECK(free_bytes(directory.path()) > 0);
    expect_error(Exit::no_input, {directory / "none"}, [&] { free_bytes(directory / "none"); });
}

TEST_CASE("globs expand in the order of names, and a glob without matches is an error with the key", "[files]") {
    TemporaryDirectory directory;
    for (const char* name : {"train_2.bin", "train_10.bin", "train_1.bin", "val_1.bin", "[x].bin"})
        put(directory / name, "");
    CHECK(expand_glob(directory / "train_*.bin", "data.train") ==
          std::vector<std::string>{directory / "train_1.bin", directory / "train_10.bin", directory / "train_2.bin"});
    CHECK(expand_glob(directory / "val_1.bin", "data.val").size() == 1);
    const std::string sentence = expect_error(Exit::no_input, {"data.train", directory / "test_*.bin"},
                                              [&] { expand_glob(directory / "test_*.bin", "data.train"); });
    expect_error(Exit::no_input, {"data.val"}, [&] { expand_glob("", "data.val"); });

    for (const char* folder : {"a", "a-b", ".c"}) {
        make_directory(directory / folder);
        put(directory / (folder + "/x.bin"s), "");
    }
    ::symlink("absent", (directory / "link.bin").c_str());  // opening it reports the missing target
    const auto found = [&](const char* pattern) {
        std::string names;
        for (const std::string& path : expand_glob(directory / pattern, "data.train"))
            names += path.substr(directory.path().size() + 1) + " ";
        return names;
    };
    CHECK(found("*/x.bin") == "a-b/x.bin a/x.bin ");
    CHECK(found("a/*.bin") == "a/x.bin ");
    CHECK(found("a/./[!y].bin") == "a/./x.bin ");
    CHECK(found("\\[x\\].bin") == "[x].bin ");
    CHECK(found("l*.bin") == "link.bin ");
    CHECK(found("link.bin") == "link.bin ");
    for (const char* absent : {"none/*.bin", "val_1.bin/*", "none", "?/none"})
        expect_error(Exit::no_input, {"no file matches"}, [&] { found(absent); });
}

TEST_CASE("a folder that cannot be listed is not treated as empty", "[files]") {
    TemporaryDirectory directory;
    make_directory(directory / "data");
    put(directory / "data/train_1.bin", "");
    const std::pair<int, Exit> cases[] = {{EACCES, Exit::permission}, {EMFILE, Exit::io},
                                          {ENFILE, Exit::io},         {EIO, Exit::io},
                                          {ESTALE, Exit::io},         {ENOENT, Exit::no_input}};
    for (const auto& [error, code] : cases)
        for (const char* pattern : {"data/train_*.bin", "*/train_1.bin"}) {
            const SystemFault fault(SystemCall::list, directory.path(), error);
            expect_error(code, {"data.train", directory.path(), std::strerror(error)},
                         [&] { expand_glob(directory / pattern, "data.train"); });
        }
    for (const auto& [error, code] : {std::pair{EACCES, Exit::permission}, {ESTALE, Exit::io}}) {
        const SystemFault fault(SystemCall::examine, "train_1.bin", error);
        expect_error(code, {"data.train", "train_1.bin", std::strerror(error)},
                     [&] { expand_glob(directory / "data/train_1.bin", "data.train"); });
    }
}

TEST_CASE("a file's format is identified by its first bytes", "[files]") {
    struct Case {
        std::string bytes;
        const char* meaning;
    };
    for (const Case& c : {Case{"<!DOCTYPE html><html>", "an HTML page"}, Case{"\n  <HTML lang=en>", "an HTML page"},
                          Case{"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"},
                          Case{"PK\3\4....", "a zip archive"}, Case{"\x1f\x8b\x08", "a gzip file"},
                          Case{"PK\3\4....ckpt/data.pkl", "a PyTorch file"}, Case{"\xfd\x37zXZ\0\0"s, "an xz file"},
                          Case{"{\"a\": 1}", "a JSON text"}, Case{"Once upon a time", "plain text"},
                          Case{"\x88\xd8\x34\x01\1\0\0\0"s, "an llm.c token shard (GPT-2)"},
                          Case{"\xc6\xd7\x34\x01\3\0\0\0"s, "an llm.c model"},
                          Case{"\x7f"
                               "ELF\2",
                               "a program"},
                          Case{"\x50\0\0\0\0\0\0\0{\"wte\":"s, "a safetensors file"},
                          Case{std::string(64, '\0'), "zero bytes"}, Case{"\x01\x02\x03\x04", "unknown binary data"},
                          Case{"PK", "plain text"}, Case{"\x80\2}q", "a Python pickle"}}) {
        INFO(c.meaning);
        CHECK(describe_content(c.bytes, c.bytes.size()).starts_with(c.meaning));
    }
    CHECK(describe_content("", 0) == "an empty file");
}

TEST_CASE("a message for a terminal has no control characters except line ends and tabs", "[files]") {
    CHECK(printable_text("a\tb\nnaïve €") == "a\tb\nnaïve €");
    CHECK(printable_text("\x1b[31mred\x07\r\x7f") == "\\x1b[31mred\\x07\\x0d\\x7f");
    CHECK(printable_text("\xc2\x9b\x33\x31m \xc2\xa0") == "\\x9b31m \xc2\xa0");  // CSI in one character; a space
    CHECK(printable_text(std::string_view("\0", 1)) == "\\x00");
}

TEST_CASE("parse_json_or_null rejects what parse_json rejects, such as nesting that exhausts the stack", "[files]") {
    CHECK(parse_json_or_null("[1]").dump() == "[1]");
    CHECK(parse_json_or_null("[1").is_null());
    CHECK(parse_json_or_null(std::string(1 << 20, '[') + std::string(1 << 20, ']')).is_null());
}

TEST_CASE("parse_record keeps numbers and strings of an object", "[files]") {
    const JsonRecord record = parse_record(R"({"step":7,"loss":2.5,"lr":"nan","none":null,"list":[1],"ok":true})");
    CHECK(record.numbers == std::map<std::string, double>{{"loss", 2.5}, {"step", 7}});
    CHECK(record.texts == std::map<std::string, std::string>{{"lr", "nan"}});
    for (const char* invalid : {"", "[1]", "{\"step\":7", "{\"step\":7}{}"})
        CHECK(parse_record(invalid).numbers.empty());
}

TEST_CASE("JSON is written with U+FFFD for bytes that are not UTF-8", "[files]") {
    CHECK(quoted("a\"\n\xff") == "\"a\\\"\\n\ufffd\"");
    CHECK(valid_utf8("a\"\n\xff\xc3\xa9") == "a\"\n\ufffd\u00e9");
    CHECK(printed("\u00e9"s) == "\"\\u00e9\"");
    CHECK(json_object({{"b", int64_t(1)}, {"a", 2.0}, {"c", "\xff"}}) == "{\"b\":1,\"a\":2.0,\"c\":\"\ufffd\"}");
}

TEST_CASE("parse_json keeps order and values and stops at its limits", "[files]") {
    const std::string text = R"({"z":1,"a":[true,null,-2,18446744073709551615,0.1,"\u00e9\n"],"m":{"b":{},"a":[]}})";
    CHECK(parse_json(text, "f", Exit::data).dump() == nlohmann::ordered_json::parse(text).dump());
    CHECK(parse_json("\xef\xbb\xbf[]", "f", Exit::data).is_array());  // a byte order mark is skipped
    CHECK(parse_json("[[[]]]", "f", Exit::data, {.max_depth = 3}).dump() == "[[[]]]");
    expect_error(Exit::data, {"f, line 1, column 4", "3 deep"},
                 [] { parse_json("[[[[]]]]", "f", Exit::data, {.max_depth = 3}); });
    CHECK(parse_json("[1,2,3]", "f", Exit::data, {.max_values = 4}).size() == 3);
    expect_error(Exit::data, {"more than 4 values"},
                 [] { parse_json("[1,2,3,4]", "f", Exit::data, {.max_values = 4}); });

    // A prefix of a valid text is never valid.
    for (size_t length = 0; length < text.size(); length++)
        expect_error(Exit::config, {"f"}, [&] { parse_json(text.substr(0, length), "f", Exit::config); });

    // A key may occur once per object; the first repeated key is reported. Other objects may have the same key.
    const std::string nested = R"({"a":{"a":1,"b":[{"a":{"c":{}}},{"a":2}]},"b":{"b":[]},"c":3})";
    CHECK(parse_json(nested, "f", Exit::data).dump() == nested);
    expect_error(Exit::data, {"f, line 2, column 4", "duplicate key \"b\""},
                 [] { parse_json("{\"c\":{\"b\":0},\"b\":1,\"a\":2,\n \"b\":3,\"a\":4,\n\"b\":5}", "f", Exit::data); });

    // The time of a large object is linear in its size: 100,000 keys, as in a tokenizer's vocabulary.
    std::string large = "{";
    for (int i = 0; i < 100000; i++) large += (i ? ",\"k" : "\"k") + std::to_string(i) + "\":" + std::to_string(i);
    CHECK(parse_json(large + "}", "f", Exit::data).size() == 100000);
    expect_error(Exit::data, {"duplicate key \"k7\""}, [&] { parse_json(large + ",\"k7\":0}", "f", Exit::data); });
}
