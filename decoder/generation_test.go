package decoder

import (
	"errors"
	"io/fs"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"gorgonia.org/leanattention/examples/opt/tiny"
)

// generationOf reads a config.json and a generation_config.json of a model with 100 tokens. "" for file means that the model has
// no generation_config.json.
func generationOf(config, file string) (generation, error) {
	var data []byte
	if file != "" {
		data = []byte(file)
	}
	c := parseConfig("config.json", "", []byte(config))
	c.ignore(withoutEffect...)
	return readGeneration(c, generationFile, data, 100)
}

// TestEnds checks the end tokens. As in transformers, generation_config.json overrides config.json.
func TestEnds(t *testing.T) {
	for _, c := range []struct {
		config, file string
		want         []int
	}{
		{`{}`, ``, nil},
		{`{}`, `{}`, nil},
		{`{"eos_token_id": 5}`, ``, []int{5}},
		{`{"eos_token_id": [5, 3]}`, ``, []int{5, 3}},
		{`{"eos_token_id": 5}`, `{}`, []int{5}},
		{`{"eos_token_id": 5}`, `{"eos_token_id": null}`, []int{5}},
		{`{"eos_token_id": 5}`, `{"eos_token_id": 7}`, []int{7}},
		{`{"eos_token_id": 5}`, `{"eos_token_id": [2, 10]}`, []int{2, 10}},
		{`{"eos_token_id": null}`, `{"bos_token_id": 2}`, nil},
		{`{"eos_token_id": null}`, `{"eos_token_id": [4]}`, []int{4}},
		{`{"eos_token_id": 5}`, `{"eos_token_id": []}`, []int{}},
	} {
		g, err := generationOf(c.config, c.file)
		if err != nil || !slices.Equal(g.ends, c.want) {
			t.Errorf("%s and %s: %v, error %v, want %v", c.config, c.file, g.ends, err, c.want)
		}
	}
}

// TestGenerationSampling checks the sampling of a file. Absent fields have the defaults of transformers.
func TestGenerationSampling(t *testing.T) {
	for _, c := range []struct {
		file string
		want Sampling
	}{
		{`{}`, Sampling{}},
		{`{"temperature": 0.6, "top_p": 0.9, "top_k": 20}`, Sampling{}}, // greedy
		{`{"do_sample": false, "temperature": 0, "top_h": 0.4, "eta_cutoff": 0.1}`, Sampling{}},
		{`{"do_sample": null, "repetition_penalty": 1.1}`, Sampling{RepetitionPenalty: 1.1}},
		{`{"do_sample": true}`, Sampling{Temperature: 1, TopK: 50}},
		{`{"do_sample": true, "top_k": null, "top_p": null, "temperature": null}`, Sampling{Temperature: 1, TopK: 50}},
		{`{"do_sample": true, "top_k": 0}`, Sampling{Temperature: 1}},
		{`{"do_sample": true, "top_k": 100}`, Sampling{Temperature: 1}}, // all tokens
		{`{"do_sample": true, "top_k": 5, "top_p": 0.0}`, Sampling{Temperature: 1, TopK: 1}},
		{`{"do_sample": true, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}`, Sampling{Temperature: 0.7, TopP: 0.8, TopK: 20, RepetitionPenalty: 1.05}},
		{`{"do_sample": true, "temperature": 2, "min_p": 0.05, "typical_p": 0.9, "epsilon_cutoff": 0.0, "eta_cutoff": 0}`, Sampling{Temperature: 2, MinP: 0.05, TypicalP: 0.9, TopK: 50}},
		{`{"do_sample": true, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}`, Sampling{Temperature: 1, TopK: 50}},
		{`{"suppress_tokens": [1, 7]}`, Sampling{Forbidden: []int{1, 7}}},
	} {
		for i, files := range [][2]string{{`{}`, c.file}, {c.file, ``}, {`{"do_sample": true, "repetition_penalty": 3}`, c.file}} {
			g, err := generationOf(files[0], files[1])
			if err != nil || !reflect.DeepEqual(g.sampling, c.want) {
				t.Errorf("%s, case %d: %+v, error %v, want %+v", c.file, i, g.sampling, err, c.want)
			}
		}
	}
}

// TestGenerationRefused checks that unsupported fields are errors with the field's name, and that fields without effect are not
// errors.
func TestGenerationRefused(t *testing.T) {
	for _, bad := range []string{
		`"no_repeat_ngram_size": 3`, `"bad_words_ids": [[5]]`, `"forced_eos_token_id": 2`, `"num_beams": 4`, `"min_length": 10`,
		`"begin_suppress_tokens": [1]`, `"sequence_bias": {"1": 2}`, `"guidance_scale": 1.5`, `"forced_bos_token_id": 0`,
		`"top_h": 0.4, "do_sample": true`, `"epsilon_cutoff": 0.001, "do_sample": true`,
	} {
		key := strings.Split(bad, `"`)[1]
		for _, files := range [][2]string{{`{}`, "{" + bad + "}"}, {"{" + bad + "}", ""}} {
			_, err := generationOf(files[0], files[1])
			where := "config.json"
			if files[1] != "" {
				where = generationFile
			}
			if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "decoder: "+where+": "+key+" is ") {
				t.Errorf("%s: error %v", files, err)
			}
		}
	}
	if _, err := generationOf(`{"num_beams": 2}`, `{}`); !errors.Is(err, ErrUnsupported) {
		t.Errorf("beams in config.json beside %s: error %v", generationFile, err)
	}
	for _, c := range []struct {
		file, word string
		kind       error
	}{
		{`{"wondrous": 1}`, `"wondrous" is "1"`, ErrUnsupported}, {`[]`, "JSON", ErrFormat}, {`null`, "JSON", ErrFormat}, {`{`, "JSON", ErrFormat}, {` `, "JSON", ErrFormat},
		{`{"eos_token_id": 100}`, "eos_token_id has 100", ErrFormat}, {`{"eos_token_id": [2, -1]}`, "eos_token_id has -1", ErrFormat},
		{`{"eos_token_id": "x"}`, "eos_token_id", ErrFormat}, {`{"suppress_tokens": [100]}`, "suppress_tokens has 100", ErrFormat},
		{`{"do_sample": 3}`, "do_sample", ErrFormat}, {`{"temperature": "warm"}`, "temperature", ErrFormat}, {`{"repetition_penalty": 0}`, "repetition_penalty is 0", ErrFormat},
		{`{"do_sample": true, "temperature": 0}`, "temperature is 0", ErrFormat}, {`{"do_sample": true, "top_k": -1}`, "top_k is -1", ErrFormat},
		{`{"do_sample": true, "top_k": 1.5}`, "top_k", ErrFormat}, {`{"do_sample": true, "top_p": 1.5}`, "top_p is 1.5", ErrFormat},
		{`{"do_sample": true, "min_p": -1}`, "min_p is -1", ErrFormat}, {`{"do_sample": true, "typical_p": 0}`, "typical_p is 0", ErrFormat},
		{`{"top_p": 1e999}`, "top_p", ErrFormat},
	} {
		if _, err := generationOf(`{}`, c.file); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.word) || !strings.Contains(err.Error(), generationFile) {
			t.Errorf("%s: error %v", c.file, err)
		}
	}
	// Fields that transformers 4.57 and 5.17 write by default, and other supported fields.
	for _, good := range []string{
		`"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": null, "num_beams": 1, "min_length": 0`,
		`"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 10, "max_length": 4096`, `"diversity_penalty": 0.0, "suppress_tokens": [ ]`,
		`"transformers_version": "5.17.0", "_from_model_config": true, "use_cache": true, "output_scores": false, "wondrous": false, "strange": null`,
		`"assistant_confidence_threshold": 0.4, "num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant", "target_lookbehind": 10, "max_new_tokens": 5`,
	} {
		if _, err := generationOf("{"+good+"}", ""); err != nil {
			t.Errorf("%s in config.json: %v", good, err)
		}
		if _, err := generationOf("{}", "{"+good+"}"); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
}

// TestModelSampling checks that a model has the sampling of its folder.
func TestModelSampling(t *testing.T) {
	files := fstest.MapFS{}
	entries, err := fs.ReadDir(tiny.Files, ".")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		data, err := fs.ReadFile(tiny.Files, e.Name())
		if err != nil {
			t.Fatal(err)
		}
		files[e.Name()] = &fstest.MapFile{Data: data}
	}
	files[generationFile] = &fstest.MapFile{Data: []byte(`{"do_sample": true, "temperature": 0.5, "suppress_tokens": [9, 8], "eos_token_id": 7}`)}
	m, err := OpenFS("a folder", files)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	m.Sampling().Forbidden[0] = 5 // changes a copy
	if want := (Sampling{Temperature: 0.5, TopK: 50, Forbidden: []int{9, 8}}); !reflect.DeepEqual(m.Sampling(), want) {
		t.Errorf("%+v, want %+v", m.Sampling(), want)
	}
	if !slices.Equal(m.Ends(), []int{7}) {
		t.Errorf("ends %v", m.Ends())
	}
	files[generationFile] = &fstest.MapFile{Data: []byte(`{"num_beams": 4}`)}
	if m, err := OpenFS("a folder", files); m != nil || !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "num_beams") {
		t.Errorf("error %v", err)
	}
}

// FuzzGeneration checks that any file is an error or gives a valid Sampling.
func FuzzGeneration(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.5, "repetition_penalty": 1.1}`,
		`{"suppress_tokens": [1, 2], "eos_token_id": [3]}`, `{"num_beams": 1.0, "bad_words_ids": []}`, `{"top_k": 1e30, "do_sample": true}`,
		`{"repetition_penalty": 1e-320, "temperature": 1e-320, "do_sample": true}`, `[`, "",
	} {
		f.Add(seed, seed)
	}
	f.Fuzz(func(t *testing.T, config, file string) {
		g, err := generationOf(config, file)
		if err != nil {
			if !errors.Is(err, ErrFormat) && !errors.Is(err, ErrUnsupported) {
				t.Fatalf("error %v", err)
			}
			return
		}
		if _, err := newSampler(&Request{Sampling: g.sampling}, 100, []int{1}, false); err != nil {
			t.Fatal(err)
		}
		for _, id := range g.ends {
			if id < 0 || id >= 100 {
				t.Fatalf("token %d ends a text", id)
			}
		}
	})
}
