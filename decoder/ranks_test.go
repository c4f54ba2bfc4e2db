//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package decoder

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/rankstest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(rankstest.Main{M: m}) }

// rankGPUs has the number of each rank's GPUs.
const rankGPUs = "DECODER_TEST_GPUS"

// TestRanks: two processes, with one or two GPUs each, continue texts as one process does.
func TestRanks(t *testing.T) {
	if rankstest.Child() {
		rankstest.Write(t, ranksTexts(t))
		return
	}
	one := rankstest.Run(t, 1, []string{rankGPUs + "=1"})
	if one[0].Err != nil || len(one[0].Text) < 60 {
		t.Fatalf("%v: %s\n%s", one[0].Err, one[0].Text, one[0].Output)
	}
	each := []string{"2"}
	if reftest.Every(t) {
		each = []string{"1", "2"}
	}
	for _, gpus := range each {
		for rank, r := range rankstest.Run(t, 2, []string{rankGPUs + "=" + gpus}) {
			if r.Err != nil || r.Text != one[0].Text {
				t.Errorf("rank %d with %s GPUs: %v: %s, want %s\n%s", rank, gpus, r.Err, r.Text, one[0].Text, r.Output)
			}
		}
	}
}

// TestRanksTPLA: two processes with a GPU and a half of latent vectors each continue texts as one process with both halves, with one sum of
// all heads. Other numbers of shards are refused.
func TestRanksTPLA(t *testing.T) {
	if !reftest.Every(t) {
		t.Skip("processes take seconds: LEANATTENTION_TESTS=all runs the test")
	}
	if !rankstest.Child() {
		one := rankstest.Run(t, 1, nil)
		if one[0].Err != nil || len(one[0].Text) < 60 {
			t.Fatalf("%v: %s\n%s", one[0].Err, one[0].Text, one[0].Output)
		}
		for rank, r := range rankstest.Run(t, 2, nil) {
			if r.Err != nil || r.Text != one[0].Text {
				t.Errorf("rank %d: %v: %s, want %s\n%s", rank, r.Err, r.Text, one[0].Text, r.Output)
			}
		}
		return
	}
	gpu, comm := joinRanks(t, nil)
	var b strings.Builder
	for _, m := range latentModels(t)[1:3] { // with biases, and without a projection of queries
		c := m.changed(t, map[string]any{"kv_lora_rank": 32, "intermediate_size": 128})
		of := func(layer int) *nn.TPLA { return &nn.TPLA{Seed: uint64(layer)} }
		fmt.Fprintln(&b, m.Name, ranksText(t, c, gpu, comm, Options{TPLA: of}))
		if comm.World().Size == 1 {
			continue
		}
		_, err := NewEngine(c.network(t), goldenWeights{goldenModel: c}, Options{Device: gpu, Ranks: comm, TPLA: func(int) *nn.TPLA { return &nn.TPLA{Shards: 4} }})
		if !errors.Is(err, ErrConfig) || !strings.Contains(fmt.Sprint(err), "4 shards of latent vectors for 2 ranks") {
			t.Errorf("shards: %v", err)
		}
	}
	rankstest.Write(t, b.String())
}

// joinRanks opens the GPUs of a rank, by default one, and joins the other ranks. Both are closed when the test ends.
func joinRanks(t *testing.T, ordinals func(rank int) []int) (*device.GPU, *ranks.Comm) {
	system.Emulate(t)
	world, err := ranks.Environment()
	if err != nil {
		t.Fatal(err)
	}
	all := []int{world.Rank}
	if ordinals != nil {
		all = ordinals(world.Rank)
	}
	gpu, err := device.Open(all...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { gpu.Close() })
	comm, err := ranks.Join(context.Background(), gpu, world)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { comm.Close() })
	return gpu, comm
}

// ranksTexts returns the texts that a rank continues, of several families.
func ranksTexts(t *testing.T) string {
	gpu, comm := joinRanks(t, func(rank int) []int {
		if os.Getenv(rankGPUs) == "2" {
			return []int{2 * rank, 2*rank + 1}
		}
		return []int{rank}
	})
	var b strings.Builder
	for _, m := range readGolden(t) {
		if m.Name != "qwen3" && m.Name != "olmo2" && !reftest.Every(t) {
			continue
		}
		var text string
		switch m.Name {
		case "llama3", "qwen3":
			c := m.changed(t, map[string]any{"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128})
			if text = ranksText(t, c, gpu, comm, Options{}); m.Name == "qwen3" && reftest.Every(t) {
				text += ranksText(t, c, gpu, comm, Options{Weights: nn.Int4})
			}
		case "phi3":
			text = ranksText(t, m.changed(t, map[string]any{"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 256, "intermediate_size": 128}), gpu, comm, Options{})
		case "opt":
			text = ranksText(t, m.changed(t, map[string]any{"num_attention_heads": 4, "hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 128}), gpu, comm, Options{})
		case "deepseek_v2_lite":
			text = ranksText(t, m.changed(t, map[string]any{"v_head_dim": 16, "intermediate_size": 128}), gpu, comm, Options{})
		case "olmo2":
			text = ranksRefuse(t, &m, gpu, comm)
		}
		fmt.Fprintln(&b, m.Name, text)
	}
	return b.String()
}

func ranksText(t *testing.T, m *goldenModel, gpu *device.GPU, comm *ranks.Comm, o Options) string {
	o.Device, o.Ranks, o.Context, o.Batch, o.Draft, o.Exact = gpu, comm, 100, 2, 4, true
	e := goldenEngine(t, m, o)
	defer e.Close()
	var texts []*Text
	for i, r := range []Request{
		{Tokens: 6}, {Tokens: 4, Draft: 3}, {Tokens: 5, Sampling: Sampling{Temperature: 1, Seed: 3}},
	} {
		r.Prompt, r.Ends = m.Prompts[i], []int{}
		text, err := e.Start(context.Background(), r)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, text)
	}
	var all [][]int
	for _, text := range texts {
		got, err := ids(text)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, got)
	}
	p, err := e.LogProbs(context.Background(), m.Prompts[0])
	if err != nil {
		t.Fatal(err)
	}
	if comm.World().Size > 1 {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		if _, err := e.Start(ctx, Request{Prompt: m.Prompts[0]}); !errors.Is(err, ErrUnsupported) {
			t.Errorf("a context that may be cancelled: %v", err)
		}
		if _, err := e.LogProbs(ctx, m.Prompts[0]); !errors.Is(err, ErrUnsupported) {
			t.Errorf("a context that may be cancelled: %v", err)
		}
	}
	return fmt.Sprintf("%v %.3f", all, p[:3])
}

// ranksRefuse: a network without weights to split, more ranks than heads, and ranks on the CPU are errors.
func ranksRefuse(t *testing.T, m *goldenModel, gpu *device.GPU, comm *ranks.Comm) string {
	if comm.World().Size == 1 {
		return ""
	}
	llama := readGolden(t)[0]
	for text, c := range map[string]struct {
		m *goldenModel
		o Options
	}{
		"no weights to split": {m, Options{Device: gpu}},
		"1 parts, and there":  {&llama, Options{Device: gpu}},
		"compute on GPUs":     {&llama, Options{}},
	} {
		c.o.Ranks = comm
		_, err := NewEngine(c.m.network(t), goldenWeights{goldenModel: c.m}, c.o)
		if !errors.Is(err, ErrUnsupported) || !strings.Contains(fmt.Sprint(err), text) {
			t.Errorf("%s: %v", text, err)
		}
	}
	return ""
}
