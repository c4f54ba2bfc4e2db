package decoder

import (
	"encoding/binary"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"gorgonia.org/leanattention/decoder/internal/gguf"
)

// metadata returns keys of a GGUF file. The values are float32, int32, bool, string, and slices of float32, int32 and string.
func metadata(keys map[string]any) (b []byte) {
	u32 := func(x uint32) { b = binary.LittleEndian.AppendUint32(b, x) }
	u64 := func(n int) { b = binary.LittleEndian.AppendUint64(b, uint64(n)) }
	text := func(s string) {
		u64(len(s))
		b = append(b, s...)
	}
	for key, value := range keys {
		text(key)
		switch x := value.(type) {
		case float64:
			u32(6)
			u32(math.Float32bits(float32(x)))
		case int:
			u32(5)
			u32(uint32(x))
		case bool:
			u32(7)
			b = append(b, map[bool]byte{true: 1}[x])
		case string:
			u32(8)
			text(x)
		case []float64:
			u32(9)
			u32(6)
			u64(len(x))
			for _, v := range x {
				u32(math.Float32bits(float32(v)))
			}
		case []int:
			u32(9)
			u32(5)
			u64(len(x))
			for _, v := range x {
				u32(uint32(v))
			}
		case []string:
			u32(9)
			u32(8)
			u64(len(x))
			for _, v := range x {
				text(v)
			}
		default:
			panic(value)
		}
	}
	return b
}

// samplingOf reads the sampling of a file with some keys, for a vocabulary of 100 tokens.
func samplingOf(t testing.TB, keys map[string]any) (Sampling, error) {
	t.Helper()
	all := map[string]any{}
	for name, x := range keys {
		all[samplingPrefix+name] = x
	}
	data := append([]byte("GGUF\x03\x00\x00\x00"), make([]byte, 8)...)
	data = binary.LittleEndian.AppendUint64(data, uint64(len(all)))
	f, err := gguf.Parse("m.gguf", append(data, metadata(all)...))
	if err != nil {
		t.Fatal(err)
	}
	return (&ggufFile{file: f, path: "m.gguf"}).sampling(100, Sampling{Seed: 9})
}

// TestGGUFSampling: keys of a GGUF file have the meaning that llama.cpp gives them.
func TestGGUFSampling(t *testing.T) {
	type keys = map[string]any
	for _, c := range []struct {
		keys keys
		want Sampling
	}{
		{keys{}, Sampling{Seed: 9}}, // as without keys
		{keys{"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0, "penalty_repeat": 1.05}, Sampling{Temperature: 0.7, TopK: 20, TopP: 0.8, RepetitionPenalty: 1.05, LastTokens: 64}},
		{keys{"temp": 1.0}, Sampling{Temperature: 1, TopK: 40, TopP: 0.95, MinP: 0.05}},
		{keys{"top_k": 30}, Sampling{Temperature: 0.8, TopK: 30, TopP: 0.95, MinP: 0.05}},
		{keys{"temp": 0.0, "top_k": 30}, Sampling{}}, // greedy
		{keys{"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.1}, Sampling{Temperature: 1, MinP: 0.1}},
		{keys{"temp": 1.0, "top_k": -1, "top_p": 0.0, "min_p": 0.0}, Sampling{Temperature: 1, TopK: 1}},
		{keys{"temp": 1.0, "top_k": 100}, Sampling{Temperature: 1, TopP: 0.95, MinP: 0.05}}, // all tokens
		{keys{"temp": 0.0, "penalty_repeat": 1.5, "penalty_last_n": -1}, Sampling{RepetitionPenalty: 1.5}},
		{keys{"temp": 0.0, "penalty_repeat": 1.5, "penalty_last_n": 0}, Sampling{}},
		{keys{"temp": 0.0, "penalty_repeat": 1.5, "penalty_last_n": 8192}, Sampling{RepetitionPenalty: 1.5, LastTokens: 8192}},
		{keys{"temp": 0.0, "penalty_last_n": 32}, Sampling{LastTokens: 32}},
		{keys{"temp": 0.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1}, Sampling{}},
		{keys{"sequence": "penalties;temperature;top_k;top_p", "temp": 0.6, "top_k": 50, "top_p": 0.9, "penalty_repeat": 1.1, "penalty_last_n": 8}, Sampling{Temperature: 0.6, TopK: 50, TopP: 0.9, RepetitionPenalty: 1.1, LastTokens: 8}},
		{keys{"sequence": "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature", "temp": 0.6}, Sampling{Temperature: 0.6, TopK: 40, TopP: 0.95, MinP: 0.05}},
		{keys{"sequence": "top_k;temperature", "temp": 0.6, "penalty_repeat": 1.1}, Sampling{Temperature: 0.6, TopK: 40}},
		{keys{"sequence": "min_p", "temp": 0.6}, Sampling{Temperature: 1, MinP: 0.05}},
		{keys{"sequence": "", "temp": 0.6}, Sampling{Temperature: 0.6, TopK: 40, TopP: 0.95, MinP: 0.05}},
	} {
		got, err := samplingOf(t, c.keys)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v: %+v, error %v, want %+v", c.keys, got, err, c.want)
		}
		if _, err := newSampler(&Request{Sampling: got}, 100, nil, false); err != nil {
			t.Errorf("%v: %v", c.keys, err)
		}
	}
	for _, c := range []struct {
		key   string
		value any
		kind  error
	}{
		{"dry_multiplier", 0.8, ErrUnsupported}, {"typical_p", 0.9, ErrUnsupported}, {"wondrous", false, ErrUnsupported},
		{"xtc_probability", 0.5, ErrUnsupported}, {"mirostat", 2, ErrUnsupported},
		{"sequence", "top_p;top_k", ErrUnsupported}, {"sequence", "top_k;temperature;top_p", ErrUnsupported}, {"sequence", "top_k;penalties", ErrUnsupported},
		{"sequence", "top_k;top_k", ErrUnsupported}, {"sequence", "edskypmxt", ErrUnsupported}, {"sequence", 3, gguf.ErrType},
		{"temp", -0.1, ErrFormat}, {"temp", math.NaN(), ErrFormat}, {"temp", math.Inf(1), ErrFormat}, {"temp", "hot", gguf.ErrType}, {"top_p", 1.5, ErrFormat}, {"min_p", -0.5, ErrFormat},
		{"penalty_repeat", 0.0, ErrFormat}, {"penalty_last_n", -2, ErrFormat}, {"top_k", 1.5, gguf.ErrType}, {"mirostat", -1, ErrFormat}, {"mirostat_tau", "x", gguf.ErrType},
	} {
		k := keys{"min_p": 0.1}
		k[c.key] = c.value
		if s, err := samplingOf(t, k); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), samplingPrefix+c.key) || !strings.Contains(err.Error(), "m.gguf") || !reflect.DeepEqual(s, Sampling{}) {
			t.Errorf("%s of %v: %+v, %v, want %v", c.key, c.value, s, err, c.kind)
		}
	}
}

// TestGGUFModelSampling: an open model has the sampling of its file.
func TestGGUFModelSampling(t *testing.T) {
	data, err := os.ReadFile("internal/gguf/testdata/families/llama.gguf")
	if err != nil {
		t.Fatal(err)
	}
	tokens, scores, types := []string{}, []float64{}, []int{}
	for i := range 24 {
		tokens, scores, types = append(tokens, string(rune('a'+i))), append(scores, float64(-i)), append(types, 1)
	}
	tokens[0], types[0], tokens[1], types[1], tokens[2], types[2] = "<unk>", 2, "<s>", 3, "</s>", 3
	open := func(more map[string]any) (*Model, error) {
		keys := map[string]any{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": types}
		for key, x := range more {
			keys[key] = x
		}
		// The data stay aligned.
		keys["general.description"] = ""
		const header = 24
		text := metadata(keys)
		keys["general.description"] = strings.Repeat(" ", (32-len(text)%32)%32)
		text = metadata(keys)
		file := append(append(append([]byte{}, data[:header]...), text...), data[header:]...)
		binary.LittleEndian.PutUint64(file[16:], binary.LittleEndian.Uint64(file[16:])+uint64(len(keys)))
		path := filepath.Join(t.TempDir(), "m.gguf")
		if err := os.WriteFile(path, file, 0o666); err != nil {
			t.Fatal(err)
		}
		return Open(path)
	}
	for _, c := range []struct {
		keys map[string]any
		want Sampling
	}{{nil, Sampling{}}, {map[string]any{"general.sampling.temp": 0.5, "general.sampling.top_k": 7}, Sampling{Temperature: 0.5, TopK: 7, TopP: 0.95, MinP: 0.05}}} {
		m, err := open(c.keys)
		if err != nil {
			t.Fatal(err)
		}
		if got := m.Sampling(); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v: %+v, want %+v", c.keys, got, c.want)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
	if m, err := open(map[string]any{"general.sampling.mirostat": 1}); m != nil || !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "general.sampling.mirostat") {
		t.Errorf("mirostat: %v", err)
	}
}
