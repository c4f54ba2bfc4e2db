package report

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// claim is a line of the README's table. It shows the range of one metric's figures, or one figure per table.
type claim struct {
	what, against string // %d in what is the number of shapes; an empty against repeats the line above
	tables        []string
	only          string // pattern of the cases
	who           string
	metric        measure.Metric
	form          string
}

var optSteps = []string{"A decode step of OPT-125m in float16", "A decode step of OPT-1.3b in float16", "A decode step of OPT-6.7b in float16"}

var claims = []claim{
	{"`Attend`, float32, keys from memory", "the memory's speed", []string{"Keys and values of 256 MB and more"}, "^f32", "lean, Attend", measure.Share, ""},
	{"the same, 16 bits, 1 to 4 query heads a KV head", "", []string{"Keys and values of 256 MB and more"}, `^b?f16, 32(/8)? `, "lean, Attend", measure.Share, ""},
	{"the same, 16 bits, 8 query heads a KV head", "", []string{"Keys and values of 256 MB and more"}, `^b?f16, 32/4 `, "lean, Attend", measure.Share, ""},
	{"`Attend`, 12 heads x 1024 x 64 in cache", "Gorgonia's own nodes", []string{"12 heads x 1024 x 64, the same keys and values in every step"}, "", "lean, Attend", measure.OverStock, "f1"},
	{"the same as a node", "", []string{"12 heads x 1024 x 64, the same keys and values in every step"}, "", "lean, node", measure.OverStock, "f1"},
	{"`Attend`, float32, from memory", "PyTorch", []string{"One query a head, against scaled_dot_product_attention"}, `^f32, \d+ heads x \d+ x \d+$`, "lean, Attend", measure.OverTorch, "f1"},
	{"OPT-125m's shape, float32 weights", "CTranslate2 float32", []string{"One sequence, behind 64 tokens"}, "", "lean, f32 weights", measure.OverCT2, "f1"},
	{"the same, float16 weights", "CTranslate2 int8", []string{"One sequence, behind 64 tokens"}, "", "lean, f16 weights", measure.OverInt8, "f1"},
	{"attention on a GPU, a query head a KV head, 300 MB and more", "the memory's speed", []string{"Of the memory's speed"}, "^a query head", "lean", "", "%"},
	{"attention on a GPU, geometric mean of %d shapes", "the better of cuDNN and FlashDecoding", []string{"Against PyTorch, by the time of our launch"}, "^all$", "lean", "x best peer, geometric mean", "f2"},
	{"the same, %d launches below 7 us", "", []string{"Against PyTorch, by the time of our launch"}, "^below 7 us$", "lean", "x best peer, geometric mean", "f2"},
	{"attention in pages of 16, geometric mean of %d shapes", "the best of FlashInfer", []string{"Against FlashInfer, H100"}, "^pages of 16, with", "lean", "x best peer, geometric mean", "f2"},
	{"a long sequence among 31 short ones, pages of 16", "FlashInfer's decode kernels", []string{"Ragged batches against FlashInfer, H200"}, "^A", "lean, pages of 16", measure.OverBest, "f1"},
	{"a decode step of OPT-125m, 1.3b, 6.7b on a GPU", "transformers, compiled", optSteps, "^b1, behind 1024 ", "lean", measure.OverCompiled, "f1"},
	{"the same with 16 sequences", "", optSteps, "^b16, behind 1024 ", "lean", measure.OverCompiled, "f1"},
	{"the same of 6.7b, one sequence, 1024 to 32768 tokens", "the memory's speed", optSteps[2:], "^b1, ", "lean", measure.GPUShare, "%"},
	{"attention of causal prompts on a GPU, geometric mean", "cuDNN", []string{"All causal prompts, geometric mean"}, "", "lean", measure.OverCUDNN, "f2"},
	{"prompts of OPT-6.7b, mixed precision", "transformers", []string{"Prompts of OPT-6.7b in float16"}, "", "lean, mixed precision", measure.OverHF, "f2"},
}

const begin, end = "<!-- speed: written by leanbench report -->\n", "<!-- end of speed -->\n"

// readme returns the README beside the folder docs with a new table of claims. Without a README it returns an
// empty name.
func (t *tables) readme(folder string) (name string, text []byte, err error) {
	name = filepath.Join(folder, "..", "..", "README.md")
	old, err := os.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil, nil
	} else if err != nil {
		return "", nil, err
	}
	before, rest, ok := bytes.Cut(old, []byte(begin))
	_, after, ok2 := bytes.Cut(rest, []byte(end))
	if !ok || !ok2 {
		return "", nil, fmt.Errorf("%s: no lines %q and %q", name, begin, end)
	}
	var w bytes.Buffer
	w.Write(before)
	w.WriteString(begin)
	if err := t.writeClaims(&w); err != nil {
		return "", nil, err
	}
	w.WriteString(end)
	w.Write(after)
	return name, w.Bytes(), nil
}

func (t *tables) writeClaims(w *bytes.Buffer) error {
	w.WriteString("| what | against | ratio | measured on |\n|---|---|---|---|\n")
	against, last := "", ""
	for _, c := range claims {
		ratio, err := t.ratio(c)
		if err != nil {
			return err
		}
		what := c.what
		if strings.Contains(what, "%d") {
			n, err := t.ratio(claim{c.what, "", c.tables, c.only, c.who, "shapes", "f0"})
			if err != nil {
				return err
			}
			what = strings.Replace(what, "%d", n, 1)
		}
		if c.against != "" {
			against = c.against
		}
		where := t.where(c.tables[0])
		shown := where
		if where == last && c.against == "" {
			shown = "" // same as in the line above
		}
		last = where
		fmt.Fprintf(w, "| %s | %s | %s | %s |\n", what, against, ratio, shown)
	}
	return nil
}

// ratio formats the smallest and the largest of a claim's figures, or one value per table if there are
// several tables.
func (t *tables) ratio(c claim) (string, error) {
	only := regexp.MustCompile(c.only)
	var parts []string
	for _, table := range c.tables {
		var some []measure.Figure
		for _, f := range t.figures[table] {
			any := c.metric == "" && (f.Metric == "of the read ceiling, least" || f.Metric == "of the read ceiling, most")
			if only.MatchString(f.Case) && f.Contender == c.who && (f.Metric == c.metric || any) {
				some = append(some, f)
			}
		}
		if len(some) == 0 {
			return "", fmt.Errorf("README: %s: there is no such figure in %q", c.what, table)
		}
		by := func(a, b measure.Figure) int {
			return int(1e9 * (a.Value - b.Value))
		}
		least, most := slices.MinFunc(some, by), slices.MaxFunc(some, by)
		text := format(c.form, least)
		if high := format(c.form, most); high != text {
			text += " to " + high
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", "), nil
}

// where describes the machine of a table's report in a few words.
func (t *tables) where(table string) string { return t.whereOf(t.reports[table]) }

func (t *tables) whereOf(r *measure.Report) string {
	m := r.Machine
	if m.GPU != "" {
		gpu, _, _ := strings.Cut(m.GPU, ",")
		return gpu
	}
	cpu := strings.TrimSuffix(strings.NewReplacer("(R)", "", "Intel ", "").Replace(m.CPU), " Processor")
	return fmt.Sprintf("%s, %d cores, %s", cpu, m.Workers, strings.ToUpper(m.Kernels))
}
