package tokenizer

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"gorgonia.org/leanattention/internal/reftest"
)

// TestBytes: for every kind of tokenizer, a text is the bytes of its tokens, if these are valid UTF-8 that does not begin with a space.
func TestBytes(t *testing.T) {
	rng := reftest.Rand(t)
	for _, k := range readKinds(t) {
		tok := k.load(t)
		var all []int
		for id := range tok.VocabSize() {
			b, ok := tok.Bytes(id)
			if _, special := tok.Special(id); special && ok || ok != (len(b) > 0) {
				t.Fatalf("%s: token %d: %q, %v", k.Name, id, b, ok)
			}
			if ok {
				all = append(all, id)
			}
		}
		texts := 0
		for range 2000 {
			var ids []int
			var want []byte
			for range 1 + rng.IntN(5) {
				id := all[rng.IntN(len(all))]
				b, _ := tok.Bytes(id)
				ids, want = append(ids, id), append(want, b...)
			}
			if !utf8.Valid(want) || strings.ContainsAny(string(want[:1]), " ") || want[len(want)-1] == ' ' {
				continue
			}
			texts++
			if got := tok.Decode(ids); got != string(want) {
				t.Fatalf("%s: tokens %v are %q, and their bytes %q", k.Name, ids, got, want)
			}
		}
		if texts < 100 {
			t.Errorf("%s: %d texts of %d tokens", k.Name, texts, len(all))
		}
		if _, ok := tok.Bytes(-1); ok || slices.Contains(all, tok.VocabSize()) {
			t.Errorf("%s: ids outside of the vocabulary have bytes", k.Name)
		}
	}
}
