// GPT-2's pre-tokenisation: the cutting of text into words, numbers, punctuation and white space that byte pairs never
// cross (Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.2).
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

// Cuts text by GPT-2's pattern. Bytes that are not UTF-8 become pieces of their own, one per run of them, so the pieces
// of any bytes, put together again, are those bytes. One object serves one thread.
class Pretokenizer {
public:
    Pretokenizer();
    ~Pretokenizer();
    Pretokenizer(Pretokenizer&&) noexcept;
    Pretokenizer& operator=(Pretokenizer&&) noexcept;

    // Calls visit(std::string_view piece) for each piece, in order.
    template <class Visit> void split(std::string_view text, Visit&& visit) {
        valid_end_ = 0;
        for (size_t begin = 0; begin < text.size();) {
            size_t end = piece_end(text, begin);
            visit(text.substr(begin, end - begin));
            begin = end;
        }
    }

private:
    size_t piece_end(std::string_view text, size_t begin);

    struct Pattern;
    std::unique_ptr<Pattern> pattern_;
    size_t valid_end_ = 0;  // end of the run of valid UTF-8 that is being cut
};

// The last place in `text`, beyond its first byte, where it may be cut without any change of its pieces, whatever
// follows: between a character that is no white space and ASCII white space. 0 if there is none.
size_t last_safe_cut(std::string_view text);
