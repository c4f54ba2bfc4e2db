package decoder

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"gorgonia.org/leanattention/decoder/internal/hf"
	"gorgonia.org/leanattention/internal/reftest"

	"gorgonia.org/tensor"
)

// TestLoRARefused: an adapter that would be applied in part, or wrongly, is an error that names the cause.
func TestLoRARefused(t *testing.T) {
	golden := readAdapters(t)
	good := golden[len(golden)-1]
	m := goldenModelOf(t, good.Model)
	with := func(field string, value any) func(*goldenAdapter) {
		return func(a *goldenAdapter) {
			var config map[string]any
			if err := json.Unmarshal(a.Config, &config); err != nil {
				t.Fatal(err)
			}
			config[field] = value
			if value == "absent" {
				delete(config, field)
			}
			data, err := json.Marshal(config)
			if err != nil {
				t.Fatal(err)
			}
			a.Config = data
		}
	}
	renamed := func(i int, from, to string) func(*goldenAdapter) {
		return func(a *goldenAdapter) {
			if !strings.Contains(a.Tensors[i].name, from) {
				t.Fatal(a.Tensors[i].name)
			}
			a.Tensors[i].name = strings.Replace(a.Tensors[i].name, from, to, 1)
		}
	}
	reshaped := func(i int, shape ...int) func(*goldenAdapter) {
		return func(a *goldenAdapter) {
			a.Tensors[i].shape, a.Tensors[i].data = shape, make([]float32, tensor.Shape(shape).TotalSize())
		}
	}
	extra := func(name string, shape ...int) func(*goldenAdapter) {
		return func(a *goldenAdapter) {
			a.Tensors = append(a.Tensors, fileTensor{name: "base_model.model." + name, shape: shape, data: make([]float32, tensor.Shape(shape).TotalSize())})
		}
	}
	object := map[string]any{"x": 1}
	expressions := func(n int) map[string]any {
		all := map[string]any{}
		for i := range n {
			all[fmt.Sprintf("%d(%s)", i, strings.Repeat("x", 1000))] = 1
		}
		return all
	}
	for _, c := range []struct {
		change func(*goldenAdapter)
		kind   error
		words  []string
	}{
		{with("use_dora", true), ErrUnsupported, []string{"use_dora", "merge_and_unload"}},
		{with("bias", "lora_only"), ErrUnsupported, []string{"bias", "lora_only"}},
		{with("bias", "all"), ErrUnsupported, []string{"bias"}},
		{with("modules_to_save", []string{"lm_head"}), ErrUnsupported, []string{"modules_to_save"}},
		{with("peft_type", "IA3"), ErrUnsupported, []string{"peft_type", "IA3"}},
		{with("peft_type", "ADALORA"), ErrUnsupported, []string{"peft_type"}},
		{with("peft_type", "absent"), ErrMissing, []string{"peft_type"}},
		{with("lora_bias", true), ErrUnsupported, []string{"lora_bias"}},
		{with("megatron_config", object), ErrUnsupported, []string{"megatron_config"}},
		{with("trainable_token_indices", []int{1}), ErrUnsupported, []string{"trainable_token_indices"}},
		{with("init_lora_weights", "pissa"), ErrUnsupported, []string{"init_lora_weights", "pissa"}},
		{with("init_lora_weights", "pissa_niter_16"), ErrUnsupported, []string{"init_lora_weights"}},
		{with("init_lora_weights", "olora"), ErrUnsupported, []string{"init_lora_weights"}},
		{with("loftq_config", object), ErrUnsupported, []string{"loftq_config"}},
		{with("corda_config", object), ErrUnsupported, []string{"corda_config"}},
		{with("layer_replication", [][]int{{0, 1}}), ErrUnsupported, []string{"layer_replication"}},
		{with("alora_invocation_tokens", []int{3}), ErrUnsupported, []string{"alora_invocation_tokens"}},
		{with("target_parameters", []string{"x"}), ErrUnsupported, []string{"target_parameters"}},
		{with("use_qalora", true), ErrUnsupported, []string{"use_qalora"}},
		{with("task_type", "SEQ_CLS"), ErrUnsupported, []string{"task_type"}},
		{with("use_wonder", true), ErrUnsupported, []string{"use_wonder", "not known"}},
		{with("use_wonder", false), ErrUnsupported, []string{"use_wonder", "not known"}},
		{with("r", 0), ErrFormat, []string{"r is 0"}},
		{with("r", 4), ErrFormat, []string{"rank 2 in the tensors", "4 by r"}},
		{with("r", "absent"), ErrMissing, []string{": r: "}},
		{with("lora_alpha", "absent"), ErrMissing, []string{"lora_alpha"}},
		{with("lora_alpha", "x"), ErrFormat, []string{"lora_alpha"}},
		{with("lora_alpha", 1e300), ErrFormat, []string{"scale"}},
		{with("use_rslora", 1), ErrFormat, []string{"use_rslora"}},
		{with("fan_in_fan_out", 1), ErrFormat, []string{"fan_in_fan_out"}},
		{with("rank_pattern", map[string]any{"up_proj": 3}), ErrFormat, []string{"up_proj", "rank_pattern"}},
		{with("rank_pattern", map[string]any{"up_proj": 1.5}), ErrFormat, []string{"rank_pattern"}},
		{with("rank_pattern", map[string]any{"(": 1}), ErrUnsupported, []string{"rank_pattern", "list the modules"}},
		{with("rank_pattern", map[string]any{")|(": 1}), ErrUnsupported, []string{"rank_pattern"}},
		{with("rank_pattern", expressions(600)), ErrUnsupported, []string{"rank_pattern has more than 524288 bytes of regular expressions"}},
		{func(a *goldenAdapter) {
			*a = golden[0]
			with("rank_pattern", expressions(300))(a)
		}, ErrUnsupported, []string{"regular expressions of", "15 modules"}},
		{with("alpha_pattern", []int{1}), ErrFormat, []string{"alpha_pattern"}},
		{with("alpha_pattern", map[string]any{"x": "y"}), ErrFormat, []string{"alpha_pattern"}},
		{with("target_modules", "absent"), ErrMissing, []string{"target_modules"}},
		{with("target_modules", []string{"v_proj"}), ErrFormat, []string{"up_proj", "target_modules"}},
		{with("target_modules", "(?<=x)v_proj"), ErrUnsupported, []string{"target_modules", "regular expression"}},
		{with("target_modules", strings.Repeat("x", 2000)), ErrUnsupported, []string{"target_modules", "2000 bytes"}},
		{with("target_modules", "q{2}"), ErrUnsupported, []string{"target_modules", "q{2}"}},
		{with("target_modules", `\pL`), ErrUnsupported, []string{"target_modules"}},
		{with("target_modules", 3), ErrFormat, []string{"target_modules"}},
		{with("exclude_modules", []string{"up_proj"}), ErrFormat, []string{"up_proj", "exclude_modules"}},
		{with("layers_to_transform", 0), ErrFormat, []string{"layers_to_transform"}},
		{with("layers_to_transform", []int{0, 2}), ErrFormat, []string{"layers_to_transform"}},
		{with("layers_to_transform", "x"), ErrFormat, []string{"layers_to_transform"}},
		{func(a *goldenAdapter) { a.Config = []byte("{") }, ErrFormat, []string{"JSON"}},
		{func(a *goldenAdapter) { a.Config = []byte("null") }, ErrFormat, []string{"JSON"}},
		{func(a *goldenAdapter) { a.Config = nil }, ErrFormat, []string{"JSON"}},
		{func(a *goldenAdapter) { a.Tensors = nil }, ErrFormat, []string{"without tensors"}},
		{func(a *goldenAdapter) { a.Tensors = a.Tensors[1:] }, ErrMissing, []string{"up_proj.lora_B", "no partner"}},
		{func(a *goldenAdapter) { a.Tensors = a.Tensors[:3] }, ErrMissing, []string{"v_proj.lora_A", "no partner"}},
		{renamed(0, "layers.1", "layers.9"), ErrUnsupported, []string{"layers.9.mlp.up_proj.lora_A"}},
		{renamed(0, "up_proj", "experts"), ErrUnsupported, []string{"experts.lora_A"}},
		{renamed(0, "lora_A.", "lora_A.default."), ErrUnsupported, []string{"lora_A.default"}},
		{renamed(0, "base_model.model.", ""), ErrUnsupported, []string{`"layers.1.mlp.up_proj.lora_A.weight"`}},
		{reshaped(0, 2, 65), ErrFormat, []string{"up_proj.lora_A", "[2 65]", "(r, 64)"}},
		{reshaped(0, 3, 64), ErrFormat, []string{"[3 64]"}},
		{reshaped(0, 64, 2), ErrFormat, []string{"[64 2]"}},
		{reshaped(0, 128), ErrFormat, []string{"[128]"}},
		{reshaped(1, 97, 2), ErrFormat, []string{"[97 2]"}},
		{extra("model.embed_tokens.lora_embedding_A", 2, 64), ErrUnsupported, []string{"lora_embedding_A"}},
		{extra("model.embed_tokens.lora_A.weight", 2, 64), ErrUnsupported, []string{"embed_tokens.lora_A"}},
		{extra("model.norm.weight", 64), ErrUnsupported, []string{"model.norm.weight"}},
		{extra("model.layers.1.mlp.up_proj.lora_magnitude_vector", 96), ErrUnsupported, []string{"lora_magnitude_vector"}},
		{extra("model.layers.1.mlp.up_proj.lora_B.bias", 96), ErrUnsupported, []string{"lora_B.bias"}},
		{extra("model.layers.1.mlp.up_proj.base_layer.weight", 96, 64), ErrUnsupported, []string{"base_layer"}},
	} {
		a := good
		a.Tensors = slices.Clone(good.Tensors)
		c.change(&a)
		f, err := hf.OpenFS("adapter", a.files())
		if err != nil {
			t.Fatal(err)
		}
		err = fileError(m.adapt(f))
		if !errors.Is(err, c.kind) || m.deltas != nil || m.adapters != nil {
			t.Errorf("%v: %v, want %v", c.words, err, c.kind)
			continue
		}
		for _, w := range append(c.words, "adapter", "decoder: ") {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%v says nothing of %q", err, w)
			}
		}
	}
	// A tied head has no matrix of its own.
	tied := goldenModelOf(t, "qwen2")
	f, err := hf.OpenFS("adapter", (&goldenAdapter{Config: []byte(`{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["lm_head"]}`), Tensors: []fileTensor{
		{name: "base_model.model.lm_head.lora_A.weight", shape: []int{1, 64}, data: make([]float32, 64)},
		{name: "base_model.model.lm_head.lora_B.weight", shape: []int{64, 1}, data: make([]float32, 64)},
	}}).files())
	if err != nil {
		t.Fatal(err)
	}
	if err := tied.adapt(f); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "tie_word_embeddings") {
		t.Errorf("a tied head: %v", err)
	}
	// Numbers are looked at when they are merged.
	bad := good
	bad.Tensors = slices.Clone(good.Tensors)
	bad.Tensors[0].data = slices.Repeat([]float32{float32(math.NaN())}, 128)
	adaptFS(t, m, bad.files())
	if _, err := m.Engine(Options{}); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), "up_proj.lora_A") {
		t.Errorf("NaN: %v", err)
	}
}

// TestLoRAFields: fields without effect are no errors.
func TestLoRAFields(t *testing.T) {
	const start = `{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": `
	for _, c := range []struct {
		config string
		yes    []string // targeted
		no     []string
	}{
		{`["q_proj"], "peft_version": "0.99", "revision": "main", "inference_mode": true, "wondrous": null, "init_lora_weights": "eva", "eva_config": {"rho": 2}, "modules_to_save": [], "loftq_config": { }}`,
			[]string{"q_proj", "model.layers.0.self_attn.q_proj"}, []string{"model.xq_proj", "q_proj.x"}},
		{`"all-linear"}`, []string{"model.layers.0.fc1"}, []string{"lm_head"}},
		{`".*q"}`, []string{"a.q", "q"}, []string{"a.qx"}},
		{`"a|b"}`, []string{"a", "b"}, []string{"ax", "xb"}},
		{`["q", "model.layers.3.k"], "layers_to_transform": [1, 2]}`, []string{"model.layers.1.q", "model.layers.2.mlp.4.q", "model.layers.3.k"}, []string{"model.layers.3.q", "layers.q", "1.q"}},
		{`["q"], "layers_to_transform": 2, "layers_pattern": "layers"}`, []string{"model.layers.2.q"}, []string{"model.layers.1.q"}},
		{`["q"], "layers_to_transform": []}`, []string{"model.layers.2.q"}, nil},
		{`".*q", "exclude_modules": "x.*"}`, []string{"a.q"}, []string{"x.q"}},
	} {
		a, err := readAdapterConfig(adapterFile, []byte(start+c.config))
		if err != nil {
			t.Errorf("%s: %v", c.config, err)
			continue
		}
		for want, names := range map[bool][]string{true: c.yes, false: c.no} {
			for _, name := range names {
				if a.targeted(name) != want {
					t.Errorf("%s: %s is targeted: %v", c.config, name, !want)
				}
			}
		}
	}
	a, err := readAdapterConfig(adapterFile, []byte(start+`["q"], "rank_pattern": {"b.q": 8, "q": 4, "a.*": 16}, "alpha_pattern": {"^c.q": 0.5}, "use_rslora": true}`))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		module string
		rank   int
		scale  float64
	}{{"x.b.q", 8, 3 / math.Sqrt(8)}, {"a.q", 4, 1.5}, {"a.k", 16, 0.75}, {"c.q", 4, 0.25}, {"x.c.q", 4, 1.5}, {"k", 2, 3 / math.Sqrt(2)}, {"bxq", 8, 3 / math.Sqrt(8)}, {"xb.q", 4, 1.5}} {
		if s, err := a.scale(c.module, c.rank); err != nil || math.Abs(s-c.scale) > 1e-12 {
			t.Errorf("%s: %v, %v, want %v", c.module, s, err, c.scale)
		}
		if _, err := a.scale(c.module, c.rank+1); !errors.Is(err, ErrFormat) {
			t.Errorf("%s with another rank: %v", c.module, err)
		}
	}
}

// mutated is one damaged adapter: an error, or deltas that can be added.
func mutated(t testing.TB, m *Model, config, tensors []byte) {
	t.Helper()
	f, err := hf.OpenFS("adapter", fstest.MapFS{adapterFile: {Data: config}, "adapter_model.safetensors": {Data: tensors}})
	if err != nil {
		t.Fatal(err)
	}
	x := *m
	if err := x.adapt(f); err != nil {
		if text := err.Error(); len(text) > 4000 || !strings.HasPrefix(text, "decoder: ") {
			t.Fatalf("%d bytes: %.300q", len(text), text)
		}
		return
	}
	for w := range tensors2D(&x) {
		_, _ = x.weights().Tensor(w.Name, w.Shape...)
	}
	if err := x.Close(); err != nil {
		t.Error(err)
	}
}

// tensors2D yields the tensors with deltas.
func tensors2D(m *Model) iter.Seq[hf.Weight] {
	return func(yield func(hf.Weight) bool) {
		for w := range tensors(m.network) {
			if m.deltas[w.Name] != nil && !yield(w) {
				return
			}
		}
	}
}

// TestLoRADamaged: 2,000 damaged adapters are no panics.
func TestLoRADamaged(t *testing.T) {
	m := goldenModelOf(t, "granite")
	files := [2][]byte{}
	for i, name := range []string{adapterFile, "adapter_model.safetensors"} {
		var err error
		if files[i], err = os.ReadFile(filepath.Join("testdata/lora", name)); err != nil {
			t.Fatal(err)
		}
	}
	rng := reftest.Rand(t)
	for range 2000 {
		bad := [2][]byte{slices.Clone(files[0]), slices.Clone(files[1])}
		i := rng.IntN(2)
		for range 1 + rng.IntN(3) {
			n := len(bad[i])
			if i == 1 && rng.IntN(4) > 0 {
				n = min(n, 700) // the header
			}
			if n == 0 {
				break
			}
			switch at := rng.IntN(n); rng.IntN(4) {
			case 0:
				bad[i][at] ^= 1 << rng.IntN(8)
			case 1:
				bad[i] = slices.Delete(bad[i], at, min(at+1+rng.IntN(20), len(bad[i])))
			case 2:
				bad[i] = slices.Insert(bad[i], at, bad[i][rng.IntN(n)])
			default:
				bad[i] = bad[i][:max(1, at)]
			}
		}
		mutated(t, m, bad[0], bad[1])
	}
}

func FuzzLoRA(f *testing.F) {
	m := goldenModelOf(f, "granite")
	for _, c := range readAdapters(f) {
		f.Add([]byte(c.Config), safetensors(c.Tensors))
	}
	f.Add([]byte(`{"peft_type":"LORA","r":1,"lora_alpha":1,"target_modules":".*","rank_pattern":{"(a|b)*":2}}`), safetensors(nil))
	f.Fuzz(func(t *testing.T, config, tensors []byte) { mutated(t, m, config, tensors) })
}

// TestLoRABounds: the memory and the time for a hostile configuration are in proportion to the file.
func TestLoRABounds(t *testing.T) {
	var many strings.Builder
	for i := range 1 << 16 {
		fmt.Fprintf(&many, `"m%d.(a|b)*c{1,50}":2,`, i)
	}
	entries := strings.TrimSuffix(many.String(), ",")
	const start = `{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": `
	for _, config := range []string{
		start + `["a"], "rank_pattern": {` + entries + "}}",
		start + `["a"], "alpha_pattern": {"` + strings.Repeat("((a{1,9}){1,9}){1,9}", 40) + `": 1}}`,
		start + `["` + strings.Repeat(`a","`, 1<<16) + `"]}`,
		start + `"` + strings.Repeat("(", 1000) + `"}`,
		start + strings.Repeat("[", 1<<16) + "}",
	} {
		var err error
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err = readAdapterConfig(adapterFile, []byte(config))
		runtime.ReadMemStats(&after)
		n := after.TotalAlloc - before.TotalAlloc
		if err != nil && len(err.Error()) > 3000 || n > uint64(200*len(config))+256<<20 {
			t.Errorf("%.60s: %d bytes allocated for %d: %.300v", config, n, len(config), err)
		}
	}
}
