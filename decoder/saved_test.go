package decoder

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// save returns the file of a beginning of n tokens.
func save(t testing.TB, e *Engine, tokens []int, n int) []byte {
	t.Helper()
	var file bytes.Buffer
	if got, err := e.Save(&file, tokens); err != nil || got != n {
		t.Fatalf("%d of %d tokens, want %d, %v", got, len(tokens), n, err)
	}
	return file.Bytes()
}

// TestSaveAhead: a text that is saved while steps of it are queued has no token of these steps.
func TestSaveAhead(t *testing.T) {
	e := smallEngine(t, Options{Context: 900, Tokens: 1000, Exact: true})
	calls := 0
	e.scheduler.runner = newFaultyRunner(e, neverFails(), &calls)
	prompt := randomTokens(reftest.Rand(t), 20)
	text, err := e.Start(context.Background(), Request{Prompt: prompt, Tokens: 800, Ends: []int{}})
	if err != nil {
		t.Fatal(err)
	}
	var files [][]byte
	all := slices.Clone(prompt)
	for token, err := range text.Tokens() {
		if err != nil {
			t.Fatal(err)
		}
		if all = append(all, token.ID); len(all)%50 == 0 {
			var file bytes.Buffer
			if _, err := e.Save(&file, all); err != nil {
				t.Fatal(err)
			}
			files = append(files, file.Bytes())
		}
	}
	other := smallEngine(t, Options{Context: 900, Exact: true})
	for _, file := range files {
		got, err := other.Load(bytes.NewReader(file))
		if err != nil || len(got) < 40 || !slices.Equal(got, all[:len(got)]) {
			t.Errorf("%d tokens are loaded: %v", len(got), err)
		}
		want := all[len(got):min(len(got)+10, len(all))]
		if next := alone(t, other, Request{Prompt: got, Tokens: 10, Ends: []int{}}); !slices.Equal(next[:len(want)], want) {
			t.Errorf("%d tokens and then %v, want %v", len(got), next, want)
		}
	}
	if calls < 100 {
		t.Errorf("%d times ahead", calls)
	}
}

// TestSaveLoad: a text that begins as a loaded one did is equal, and nothing of the beginning is computed again, in an engine of
// other sizes, too.
func TestSaveLoad(t *testing.T) {
	rng := reftest.Rand(t)
	for _, cache := range []tensor.Dtype{{}, la.BFloat16} {
		first := smallEngine(t, Options{Context: 300, Tokens: 900, Exact: true, Cache: cache})
		text := randomTokens(rng, 200)
		want := alone(t, first, Request{Prompt: text, Tokens: 40, Ends: []int{}})
		all := slices.Concat(text, want)
		file := save(t, first, text, 200)
		longer := save(t, first, all, 239) // the last token was not read
		other := slices.Concat(text[:70], []int{(text[70] + 1) % 13}, text[71:])
		wantOther := alone(t, first, Request{Prompt: other, Tokens: 40, Ends: []int{}})

		for _, o := range []Options{{Context: 300, Tokens: 900}, {Context: 250, Tokens: 1000, Batch: 3, Chunk: 20}} {
			o.Exact, o.Cache = true, cache
			e := smallEngine(t, o)
			got, err := e.Load(bytes.NewReader(append(slices.Clone(file), "more"...)))
			if err != nil || !slices.Equal(got, text) {
				t.Fatalf("%v, %v", got, err)
			}
			if got := alone(t, e, Request{Prompt: text, Tokens: 40, Ends: []int{}}); !slices.Equal(got, want) {
				t.Errorf("%+v: %v, want %v", o, got, want)
			}
			if st := e.Stats(); st.SharedTokens != 199 || st.Rows != 40 { // one token is read for its logits
				t.Errorf("%+v: %+v", o, st)
			}
			if got := alone(t, e, Request{Prompt: other, Tokens: 40, Ends: []int{}}); !slices.Equal(got, wantOther) {
				t.Errorf("%+v: %v, want %v", o, got, wantOther)
			}
			if st := e.Stats(); st.SharedTokens != 199+70 {
				t.Errorf("%+v: %+v", o, st)
			}
			// What was loaded is saved as it was.
			if again := save(t, e, text[:199], 199); !bytes.Equal(again, save(t, first, text[:199], 199)) {
				t.Errorf("%+v: the file is another one", o)
			}
			if _, err := e.Load(bytes.NewReader(longer)); err != nil {
				t.Error(err)
			}
			if got := alone(t, e, Request{Prompt: all, Tokens: 5, Ends: []int{}}); len(got) != 5 {
				t.Errorf("%v", got)
			}
			if err := pagesLost(e); err != nil {
				t.Error(err)
			}
			if n, err := e.Save(&bytes.Buffer{}, text); n != 0 || err != nil {
				t.Errorf("%d tokens of an empty cache, %v", n, err)
			}
		}
	}
}

// TestSaveLive: of a text that is computed, what was read is saved, and a full cache of texts refuses another one.
func TestSaveLive(t *testing.T) {
	rng := reftest.Rand(t)
	e := smallEngine(t, Options{Context: 256, Tokens: 256, Exact: true})
	prompt := randomTokens(rng, 150)
	want := alone(t, e, Request{Prompt: prompt, Tokens: 100, Ends: []int{}})
	file := save(t, e, prompt, 150)
	another := randomTokens(rng, 100)
	another[0] = (prompt[0] + 1) % 13
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	text, err := e.Start(ctx, Request{Prompt: another, Ends: []int{}, Shift: true, Keep: 90}) // goes on until it is cancelled
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, err := range text.Tokens() {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 1 {
			if got, err := e.Save(&bytes.Buffer{}, another); got != 100 || err != nil {
				t.Errorf("%d tokens, %v", got, err)
			}
			if _, err := e.Load(bytes.NewReader(file)); !errors.Is(err, la.ErrCacheFull) {
				t.Errorf("%v", err)
			}
		}
		if n == 200 {
			cancel()
		}
	}
	if _, err := e.Load(bytes.NewReader(file)); err != nil {
		t.Error(err)
	}
	if got := alone(t, e, Request{Prompt: prompt, Tokens: 100, Ends: []int{}}); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if err := pagesLost(e); err != nil {
		t.Error(err)
	}
}

// otherWeights are namedWeights but for one number.
type otherWeights struct{ namedWeights }

func (w otherWeights) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	t, err := w.namedWeights.Tensor(name, shape...)
	if name == "layers.0.mlp.down_proj.weight" {
		t.Data().([]float32)[7]++
	}
	return t, err
}

// TestLoadOther: a text of another model or of other options is refused with both names.
func TestLoadOther(t *testing.T) {
	first := smallEngine(t, Options{Context: 100, Exact: true})
	text := randomTokens(reftest.Rand(t), 60)
	alone(t, first, Request{Prompt: text, Tokens: 1, Ends: []int{}})
	file := save(t, first, text, 60)

	turned := smallNetwork()
	turned.rotate(rope.Config{HeadDim: 8, Base: 500})
	larger := smallNetwork()
	larger.sizes.Vocab++
	exact := Options{Context: 100, Exact: true}
	for name, c := range map[string]struct {
		n    Network
		from Weights
		o    Options
		kind error
		want string
	}{
		"other rotations":     {turned, namedWeights{}, exact, ErrConfig, `of "a network (1 layers, 1 heads of 8, stored weights, exact products)", and this is "a network`},
		"another vocabulary":  {larger, namedWeights{}, exact, ErrConfig, "and this is"},
		"another weight":      {smallNetwork(), otherWeights{}, exact, ErrConfig, "and this is"},
		"other weights' type": {smallNetwork(), namedWeights{}, Options{Context: 100, Exact: true, Weights: la.BFloat16}, ErrConfig, "weights, exact products)\": other keys"},
		"other products":      {smallNetwork(), namedWeights{}, Options{Context: 100}, ErrConfig, "mixed products"},
		"another cache":       {smallNetwork(), namedWeights{}, Options{Context: 100, Exact: true, Cache: la.Float16}, la.ErrDType, "float32"},
		"a smaller context":   {smallNetwork(), namedWeights{}, Options{Context: 59, Exact: true}, ErrTooLong, "60 tokens, and Options.Context is 59"},
	} {
		e, err := NewEngine(c.n, c.from, c.o)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.Load(bytes.NewReader(file)); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if err := errors.Join(pagesLost(e), e.Close()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := e.Load(bytes.NewReader(file)); !errors.Is(err, ErrClosed) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := e.Save(&bytes.Buffer{}, text); !errors.Is(err, ErrClosed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	m, err := OpenFS("the shipped model", tiny.Files)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	e, err := m.Engine(Options{Context: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if _, err := e.Load(bytes.NewReader(file)); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), `"the shipped model/config.json (`) {
		t.Errorf("%v", err)
	}
}

// TestLoadDamaged: any changed byte and any cut is an error, no page is lost, and the engine computes as before.
func TestLoadDamaged(t *testing.T) {
	e := smallEngine(t, Options{Context: 100, Exact: true})
	text := randomTokens(reftest.Rand(t), 40)
	want := alone(t, e, Request{Prompt: text, Tokens: 10, Ends: []int{}})
	good := save(t, e, text, 40)
	refuse := func(what string, data []byte, kinds ...error) {
		t.Helper()
		if _, err := e.Load(bytes.NewReader(data)); !slices.ContainsFunc(kinds, func(kind error) bool { return errors.Is(err, kind) }) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for i := range good {
		bad := slices.Clone(good)
		bad[i] ^= 1 << (i % 8)
		// A changed number may be one that is not allowed before the checksum is read.
		refuse(fmt.Sprint("byte ", i), bad, ErrFormat, ErrUnsupported, ErrTooLong, la.ErrUnsupported, la.ErrShape, la.ErrDType)
		refuse(fmt.Sprint("the first ", i), good[:i], ErrFormat)
	}
	headed := func(change func(*savedHead)) []byte {
		var h savedHead
		r := bytes.NewReader(good)
		var out bytes.Buffer
		err := h.read(r, 100, 13)
		change(&h)
		if err := errors.Join(err, h.write(&out)); err != nil {
			t.Fatal(err)
		}
		return append(out.Bytes(), good[len(good)-r.Len():]...)
	}
	refuse("more tokens", headed(func(h *savedHead) { h.tokens = append(h.tokens, 1) }), ErrFormat)
	refuse("fewer tokens", headed(func(h *savedHead) { h.tokens = h.tokens[:39] }), ErrFormat)
	refuse("no tokens", headed(func(h *savedHead) { h.tokens = nil }), ErrFormat)
	refuse("a token beyond the vocabulary", headed(func(h *savedHead) { h.tokens[3] = 13 }), ErrFormat)
	refuse("another model", headed(func(h *savedHead) { h.fingerprint[0]++ }), ErrConfig)
	if err := pagesLost(e); err != nil {
		t.Error(err)
	}
	if got := alone(t, e, Request{Prompt: text, Tokens: 10, Ends: []int{}}); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// limited is a writer that fails after some bytes.
type limited struct{ left int }

func (w *limited) Write(p []byte) (int, error) {
	if len(p) > w.left {
		n := w.left
		w.left = 0
		return n, errFault
	}
	w.left -= len(p)
	return len(p), nil
}

// TestSaveFails: an error of the writer is returned, and no page is lost.
func TestSaveFails(t *testing.T) {
	e := smallEngine(t, Options{Context: 100, Exact: true})
	text := randomTokens(reftest.Rand(t), 40)
	alone(t, e, Request{Prompt: text, Tokens: 1, Ends: []int{}})
	for n := range len(save(t, e, text, 40)) {
		if _, err := e.Save(&limited{n}, text); !errors.Is(err, errFault) {
			t.Fatalf("after %d bytes: %v", n, err)
		}
	}
	if err := pagesLost(e); err != nil {
		t.Error(err)
	}
}

// FuzzSavedHead: the head of a saved text is read as it was written, or refused.
func FuzzSavedHead(f *testing.F) {
	var good bytes.Buffer
	h := savedHead{model: "a model", tokens: []int{2, 5, 9}}
	if err := h.write(&good); err != nil {
		f.Fatal(err)
	}
	f.Add(good.Bytes())
	f.Add(good.Bytes()[:50])
	f.Add(slices.Concat(good.Bytes()[:44], []byte{0xff, 0xff, 0xff, 0xff}))
	f.Fuzz(func(t *testing.T, data []byte) {
		if n := len(data) - 4; n >= 0 { // so that changes come through the checksum
			data = binary.LittleEndian.AppendUint32(data[:n:n], crc32.Checksum(data[:n], castagnoli))
		}
		var h savedHead
		r := bytes.NewReader(data)
		if err := h.read(r, 64, 300); err != nil {
			return
		}
		var again bytes.Buffer
		if err := h.write(&again); err != nil || !bytes.Equal(again.Bytes(), data[:len(data)-r.Len()]) || len(h.tokens) > 64 || len(h.model) > mostModelName {
			t.Fatalf("%+v of %x is written as %x, %v", h, data, &again, err)
		}
	})
}
