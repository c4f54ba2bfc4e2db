package report

import (
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// paperReport is one of a GPU with some figures.
func paperReport(gpu string) *measure.Report {
	r := &measure.Report{Command: "paper", Date: "2026-11-26", Machine: measure.Machine{GPU: gpu, Load: -1}}
	for _, x := range []struct {
		is        string
		us, flash float64
	}{{"b4, 32 heads x 1024 x 64", 8, 1.25}, {"b4, 32 heads x 262144 x 64", 2100, 0.93}} {
		row := r.Row("Figure 7a", x.is, lean)
		row.Add(measure.Micros, x.us, nil)
		row.Add(measure.GPUShare, 0.987, nil)
		row.Add(measure.OverFlash, x.flash, nil)
		row.Add(measure.OverFixed, 1.5*x.flash, nil)
	}
	row := r.Row("Figure 13", "b1, 56 heads x 131072 x 64", lean)
	row.Add(measure.ByteJoules, 150.4, nil)
	row.Add(measure.OfFlashJoules, 0.85, measure.AtMost(0.8))
	r.Row("Figure 13", "b1, 56 heads x 131072 x 64", measure.ReadCeiling).Add(measure.OfFlashJoules, 0.71, nil)
	r.Row("Figure 13", "b1, 56 heads x 131072 x 64", flashDecoding).Add(measure.ByteJoules, 177, nil)
	row = r.Row(PaperAll, string(measure.OverFlash), lean)
	for m, v := range map[measure.Metric]float64{"shapes": 2, "slower": 1, "mean": 1.09, "least": 0.93} {
		row.Add(m, v, nil)
	}
	for i, who := range []string{"one GPU", "2 GPUs", "4 GPUs"} {
		row := r.Row("Figure 9", "b4", who)
		row.Add(measure.Speed, 3000, nil)
		row.Add(measure.OverFixed, 0.95+0.01*float64(i), nil)
	}
	r.Row(PaperAll, string(measure.OverFixed), lean).Add("mean", 1.635, nil)
	for i, is := range []string{"1024 tokens and 128", "8192 tokens and 1024"} {
		row := r.Row("Figure 12", is, lean)
		row.Add(measure.PromptMillis, 100+136*float64(i), nil)
		row.Add(measure.OverFixed, 0.996-0.02*float64(i), nil)
		row.Add(measure.OverCompiled, 1.4, nil)
		r.Row("Figure 12", is, compiled).Add(measure.PromptMillis, 100+119*float64(i), nil)
	}
	r.Notes = []string{"PyTorch 2.11 with CUDA 13", "on another host, Z80, 2 of 2 cores: figures 7a, 9", "PyTorch 2.11 with CUDA 13 and FlashInfer 0.7", "transformers 5, PyTorch 2.11", "transformers 5, PyTorch 2.11"}
	return r
}

// TestPaperPage: the paper's figures stand beside those of each GPU, and what is lost is said.
func TestPaperPage(t *testing.T) {
	published := &measure.Report{Command: "paper (published)", Transcribed: "a text", Machine: measure.Machine{GPU: "A100", Load: -1}}
	published.Row("Figure 7a", "b4, 32 heads x 262144 x 64", publishedBy+"A100").Add(measure.OverFlash, 2.18, nil)
	published.Row("Figure 9", "b4", publishedBy+"8 A100").Add(measure.OverFixed, 2, nil)
	published.Row(PaperAll, "x FLASH", publishedBy+"A100").Add("mean", 1.73, nil)
	published.Row("Figure 8a", "b6, 48 heads x 65536 x 64", publishedBy+"H100").Add(measure.OverInfer, 4.48, nil)
	cpu := &measure.Report{Command: "paper -device cpu", Machine: measure.Machine{CPU: "Z80", Workers: 2, Kernels: "go", Cores: 2, Load: 3.04}}
	row := cpu.Row("Figure 7a", "b4, 32 heads x 256 x 64", attend)
	row.Add(measure.Micros, 1234, nil)
	row.Add(measure.OverStock, 3.14, nil)
	// Several of the same GPU.
	two := &measure.Report{Command: "paper", Machine: measure.Machine{GPU: "NVIDIA A", Load: -1}}
	two.Row("Figure 8a", "b6, 48 heads x 65536 x 64", lean).Add(measure.OverInfer, 4.5, nil)
	published.Row("Figure 12", "8192 tokens and 1024", publishedBy+"A100").Add(measure.OverPerHead, 1.73, nil)
	// Of shapes on several GPUs nothing says what all come to.
	scale := &measure.Report{Command: "scale", Machine: measure.Machine{GPU: "NVIDIA A", Load: -1}}
	for i, is := range []string{"b1, 1 heads x 1048576 x 64", "b1, 64/8 heads x 64 x 128"} {
		for j, who := range []string{"one GPU", "2 GPUs", "4 GPUs"} {
			row := scale.Row(tableScale, is, who)
			row.Add(measure.OverFlash, 1.09-0.1*float64(i*j), nil)
			if j > 0 && i == 0 {
				row.Add(measure.OverOneGPU, 1.9*float64(j), measure.AtLeast([]float64{0, 1.85, 3.85}[j]))
			}
		}
	}
	var all []*tables
	for name, r := range map[string]*measure.Report{"scale-a": scale, "paper-a": paperReport("NVIDIA A"), "paper-a-x2": two, "paper-published": published, "paper-cpu": cpu} {
		one := newTables()
		if err := one.add(name, r); err != nil {
			t.Fatal(err)
		}
		all = append(all, one)
	}
	files := make(map[string][]byte)
	if err := paperFiles("docs/paper.md", "docs/figures", all, files); err != nil {
		t.Fatal(err)
	}
	page := string(files[filepath.FromSlash("docs/paper.md")])
	for _, want := range []string{
		"| of | against | paper | on | here, A | by the schedule alone |\n",
		"| Figure 7a, b4, 32 heads x 262144 x 64 | FLASH | 2.18 | A100 | 0.93 | 1.40 |\n",
		"| mean of all shapes | FLASH | 1.73 | A100 | 1.09 | 1.64 |\n",
		"| Figure 9, b4 | fixed | 2.00 | 8 A100 | 0.97 | 0.97 |\n",
		"| Figure 8a, b6, 48 heads x 65536 x 64 | FlashInfer | 4.48 | H100 | 4.50 |  |\n",
		"| Figure 12, 8192 tokens and 1024 | per head | 1.73 | A100 |  |  |\n",
		"from a text: [JSON](figures/paper-published.json)",
		"Other programs used the machine during paper-cpu (2 cores, load 3.0),",
		"- A, against FlashDecoding: 1 of 2 shapes, least 0.93 (Figure 7a: b4, 32 heads x 262144 x 64).\n",
		"- A, Figure 13: 1 of 1 bars missed, the furthest 0.85 of FLASH's energy, bar <= 0.80 (b1, 56 heads x 131072 x 64; a kernel that only reads has 0.71).\n",
		"- A, Figure 9, against fixed split: 3 of 3, least 0.95 (b4, one GPU).\n",
		"- A, Figure 12, against fixed split: 1 of 2, least 0.98 (8192 tokens and 1024).\n" +
			"- A, Figure 12, a prompt without its tokens, against transformers, compiled: 1 of 2, the furthest 236 ms to 219 ms (8192 tokens and 1024).\n",
		"- A, Long sequences on four GPUs by heads, against FlashDecoding: 2 of 3, least 0.89 (b1, 64/8 heads x 64 x 128, 4 GPUs).\n",
		"- A, Long sequences on four GPUs by context: 1 of 2 bars missed, the furthest 3.80 x one GPU, bar >= 3.85 (b1, 1 heads x 1048576 x 64, 4 GPUs).\n",
		"| on | one GPU: x FlashDecoding | 2 GPUs: x one GPU | 2 GPUs: x FlashDecoding | 4 GPUs: x one GPU | 4 GPUs: x FlashDecoding |\n", "| A | 1.09 | 1.90 | 1.09 | **3.80** | 1.09 |\n",
		": 2026-11-26; A; PyTorch 2.11 with CUDA 13 and FlashInfer 0.7; transformers 5, PyTorch 2.11. On another host, Z80, 2 of 2 cores: figures 7a, 9.\n",
		"\n## Figure 7a: contexts\n", "](figures/paper-a-7a.svg)", "](figures/paper-cpu-7a.svg)",
		"| on | of the ceiling | x FlashDecoding | x default node | x fixed split |\n",
		"| A | 98.7% | 0.93–1.25 |  | 1.40–1.88 |\n", "| CPU |  |  | 3.14 |  |\n",
		"| on | of FlashDecoding's |\n", "| A | **0.85** |\n",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not say %q:\n%s", want, page)
		}
	}
	if len(files) != 9 || strings.Contains(page, "## Figure 8b") || strings.Contains(page, "## Figure 9: four GPUs, by contexts") || strings.Count(page, " bars missed, ") != 2 ||
		strings.Count(page, ", Long sequences on four GPUs by ") != 2 {
		t.Errorf("%d files, or a figure that is not there, or a bar that is met:\n%s", len(files), page)
	}
	// A case is one group of bars, with a colour for each program that is there.
	svg := string(files[filepath.FromSlash("docs/figures/paper-a-13.svg")])
	for text, n := range map[string]int{">b1, 56 heads x 131072 x 64<": 1, ">ours<": 1, ">FlashDecoding<": 1, ">cuDNN<": 0, ">FlashInfer<": 0} {
		if strings.Count(svg, text) != n {
			t.Errorf("%q is not %d times in the picture", text, n)
		}
	}
	for want, f := range map[string]measure.Figure{`no table "Figure 99"`: {Table: "Figure 99"}, `pages of 64, recorded" with "b2"`: {Table: tableScale, Case: "b2"}} {
		other := newTables()
		if err := other.add("x", &measure.Report{Figures: []measure.Figure{f}}); err != nil {
			t.Fatal(err)
		}
		if err := paperFiles("p.md", "f", []*tables{other}, files); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, not %q", err, want)
		}
	}
}
