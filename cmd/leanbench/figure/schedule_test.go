package figure

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"gorgonia.org/leanattention/internal/attn"
)

// run is the command.
func run(t *testing.T, args ...string) (stdout string) {
	t.Helper()
	flags := flag.NewFlagSet("schedule", flag.ContinueOnError)
	do := drawSchedules(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	if err := do(&out, &errs); err != nil || errs.Len() > 0 {
		t.Fatalf("%v: %v, %s", args, err, &errs)
	}
	return out.String()
}

// paperFigure is figure 1 of the LeanAttention paper: five multiprocessors, two heads of five LeanTiles.
const paperFigure = `
FlashAttention-2: one worker for each output tile
0 AAAAA
1 BBBBB
2 .....
3 .....
4 .....

FlashDecoding: every context in 2 splits
0 AAA
1 aa.
2 BBB
3 bb.
4 ...

LeanAttention: stream-K, equal shares
0 AA
1 aa
2 aB
3 bb
4 bb

     schedule  tile  LeanTiles  longest  occupancy  waves  partials  workspace
     per-head   256         10        5      40.0%      1         0        0 B
  fixed-split   256         10        3      66.7%      1         4     1040 B
     stream-k   256         10        2     100.0%      1         6     2640 B
`

func TestPaperFigure(t *testing.T) {
	got := run(t, "-heads", "2", "-ctx", "1280", "-workers", "5", "-policy", "per-head,fixed-split,stream-k")
	if !strings.HasSuffix(got, paperFigure) {
		t.Errorf("got\n%s\nwant\n%s", got, paperFigure)
	}
}

// TestPage: docs/schedules.md and its drawing are what the command prints and draws, and so is a ragged batch.
func TestPage(t *testing.T) {
	const docs = "../../../docs"
	file := filepath.Join(t.TempDir(), "s.svg")
	page, err := os.ReadFile(filepath.Join(docs, "schedules.md"))
	if err != nil {
		t.Fatal(err)
	}
	ragged, err := os.ReadFile("testdata/ragged.txt")
	if err != nil {
		t.Fatal(err)
	}
	all := string(page) + "```text\n" + string(ragged) + "```"
	blocks := regexp.MustCompile("(?s)```text\n\\$ leanbench schedule ([^\n]*)\n(.*?)```").FindAllStringSubmatch(all, -1)
	for i, m := range blocks {
		args := strings.Fields(m[1])
		if i == 0 {
			args = append(args, "-svg", file)
		}
		if got := run(t, args...); got != m[2] {
			t.Errorf("docs/schedules.md or testdata/ragged.txt is out of date: leanbench schedule %s prints\n%s", m[1], got)
		}
	}
	if len(blocks) < 2 {
		t.Fatalf("%d texts", len(blocks))
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if there, err := os.ReadFile(filepath.Join(docs, "schedules.svg")); err != nil || !bytes.Equal(there, got) {
		t.Errorf("docs/schedules.svg is out of date (%v): in cmd/leanbench, go run . schedule %s -svg ../../docs/schedules.svg", err, blocks[0][1])
	}
}

// drawProblem is any problem that the GPU engine computes.
func drawProblem(t *rapid.T) *problem {
	p := &problem{
		kvHeads: rapid.IntRange(1, 9).Draw(t, "KV heads"),
		dim:     rapid.SampledFrom([]int{64, 80, 128, 256}).Draw(t, "dim"),
		lengths: rapid.SliceOfN(rapid.OneOf(rapid.IntRange(0, 300), rapid.IntRange(0, 20000)), 1, 12).Draw(t, "lengths"),
		workers: rapid.IntRange(1, 140).Draw(t, "workers"),
		tile:    rapid.SampledFrom([]int{0, 1, 16, 100, 256, 1000}).Draw(t, "tile"),
		dtype:   rapid.SampledFrom([]attn.DType{attn.Float16, attn.BFloat16, attn.Float32}).Draw(t, "dtype"),
	}
	p.heads = p.kvHeads * rapid.SampledFrom([]int{1, 4, 16, 40}).Draw(t, "group")
	p.lengths[0] = max(p.lengths[0], 1)
	return p
}

// outputs is how many LeanTiles each output tile has: KV heads of sequences.
func (p *problem) outputs() (tiles []int64) {
	for _, n := range p.lengths {
		for range p.kvHeads {
			tiles = append(tiles, int64(attn.Ceil(n, p.tokens())))
		}
	}
	return tiles
}

func allOf(t interface{ Fatal(...any) }, p *problem, splits int) (all []*schedule) {
	for _, name := range policyNames {
		y := policy{name: name}
		if name == fixedSplit {
			y.splits = splits
		}
		s, err := y.schedule(p)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	return all
}

// TestSchedules: what holds of each schedule, whatever the problem.
func TestSchedules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, splits := drawProblem(t), rapid.IntRange(0, 7).Draw(t, "splits")
		want := p.outputs()
		var total int64
		for _, n := range want {
			total += n
		}
		for _, s := range allOf(t, p, splits) {
			if len(s.Workers) != p.workers {
				t.Fatalf("%s: %d workers", s.Name, len(s.Workers))
			}
			checkOnce(t, s, want)
			if o := s.occupancy(); !(o > 0 && o <= 1) || s.Name != gpuEngine && s.busy() != total {
				t.Fatalf("%s: %d LeanTiles of %d, occupancy %v", s.Name, s.busy(), total, o)
			}
			most := 2 * p.workers // partials
			switch s.Name {
			case perHead:
				if s.waves() != attn.Ceil(len(want), p.workers) || slices.ContainsFunc(s.Workers, func(k []piece) bool { return len(k) > s.waves() }) {
					t.Fatalf("per head: %d waves of %d output tiles, %d workers", s.waves(), len(want), p.workers)
				}
				most = 0
			case fixedSplit:
				if n := splits; n > 0 && s.waves() != attn.Ceil(len(want)*n, p.workers) {
					t.Fatalf("%d splits: %d waves of %d output tiles, %d workers", n, s.waves(), len(want), p.workers)
				}
			case streamK:
				if s.span() != (total-1)/int64(p.workers)+1 {
					t.Fatalf("stream-K: %d LeanTiles of %d for %d workers", s.span(), total, p.workers)
				}
				fallthrough
			default:
				if s.waves() != 1 {
					t.Fatalf("%s: %d waves", s.Name, s.waves())
				}
			}
			if n := s.partials(); n > most || s.Name != gpuEngine && int64(n)*p.partialBytes(1) > s.Workspace {
				t.Fatalf("%s: %d partials, a workspace of %d bytes", s.Name, n, s.Workspace)
			}
		}
	})
}

// checkOnce: every LeanTile comes once, and output tiles have the LeanTiles that they should.
func checkOnce(t *rapid.T, s *schedule, want []int64) {
	seen := map[int][]bool{}
	for w, pieces := range s.Workers {
		for _, k := range pieces {
			if seen[k.Output] == nil {
				seen[k.Output] = make([]bool, k.Tiles)
			}
			if k.Begin < 0 || k.Begin >= k.End || k.End > k.Tiles || int(k.Tiles) != len(seen[k.Output]) || s.Name != gpuEngine && k.Tiles != want[k.Output] {
				t.Fatalf("%s, worker %d: %+v", s.Name, w, k)
			}
			for i := k.Begin; i < k.End; i++ {
				if seen[k.Output][i] {
					t.Fatalf("%s, worker %d: LeanTile %d comes twice in %+v", s.Name, w, i, k)
				}
				seen[k.Output][i] = true
			}
		}
	}
	for o, tiles := range seen {
		if slices.Contains(tiles, false) {
			t.Fatalf("%s: output tile %d has LeanTiles that are nobody's: %v", s.Name, o, tiles)
		}
	}
	live := 0
	for _, n := range want {
		if n > 0 {
			live++
		}
	}
	if len(seen) < live || s.Name != gpuEngine && len(seen) > live { // a GPU's may have fewer rows
		t.Fatalf("%s: %d of %d output tiles", s.Name, len(seen), live)
	}
}

var escapes = regexp.MustCompile("\x1b\\[\\d+m")

// TestText: no line is wider than a terminal, and each row is a worker's.
func TestText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawProblem(t)
		all := allOf(t, p, rapid.IntRange(0, 7).Draw(t, "splits"))
		var out bytes.Buffer
		if err := writeText(&out, p, all, false); err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(out.String(), "\n")
		for _, line := range lines {
			if len(line) > columns {
				t.Fatalf("%d columns: %s", len(line), line)
			}
		}
		rows := regexp.MustCompile(`(?m)^ *\d+ ([A-Za-z.]+)$`).FindAllStringSubmatch(out.String(), -1)
		if len(rows) != len(all)*p.workers {
			t.Fatalf("%d rows of %d schedules, %d workers:\n%s", len(rows), len(all), p.workers, &out)
		}
		for i, m := range rows {
			s := all[i/p.workers]
			if works := m[1][0] != '.'; works != (len(s.Workers[i%p.workers]) > 0) {
				t.Fatalf("%s, worker %d: %q, and it has %v", s.Name, i%p.workers, m[1], s.Workers[i%p.workers])
			}
			if plain := escapes.ReplaceAllString(paint(m[1], true), ""); plain != m[1] {
				t.Fatalf("%q is %q in colours", m[1], plain)
			}
		}
	})
}

// TestSVG: it is well-formed, the same each time, and nothing is outside.
func TestSVG(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawProblem(t)
		all := allOf(t, p, 2)
		svg := drawing(p, all)
		if !bytes.Equal(svg, drawing(p, allOf(t, p, 2))) {
			t.Fatal("the second drawing differs")
		}
		d, high, bars := xml.NewDecoder(bytes.NewReader(svg)), math.Inf(1), 0
		for {
			token, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			e, ok := token.(xml.StartElement)
			if !ok {
				continue
			}
			at := map[string]float64{}
			for _, a := range e.Attr {
				at[a.Name.Local], _ = strconv.ParseFloat(a.Value, 64)
				if a.Name.Local == "class" && e.Name.Local == "rect" && len(a.Value) > 1 && a.Value[1] == ' ' {
					bars++
				}
			}
			if e.Name.Local == "svg" {
				high = at["height"]
			}
			x, y := at["x"]+at["cx"], at["y"]+at["cy"]
			if x < 0 || y < 0 || x+at["width"] > width || y+at["height"] > high || at["width"] < 0 {
				t.Fatalf("%s at (%v, %v) is not inside: %v", e.Name.Local, x, y, e.Attr)
			}
		}
		for _, s := range all {
			for _, pieces := range s.Workers {
				bars -= len(pieces)
			}
		}
		if bars != 2 { // of the legend
			t.Fatalf("%d bars more than pieces", bars)
		}
	})
}

// TestMerges: no two lines are in one place, and each has all who have a part.
func TestMerges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawProblem(t)
		for _, s := range allOf(t, p, 0) {
			type place struct{ lane, row int }
			taken := map[place]int{}
			merges := s.merges()
			for o, m := range merges {
				for row := m.workers[0]; row <= m.workers[len(m.workers)-1]; row++ {
					if other, ok := taken[place{m.lane, row}]; ok {
						t.Fatalf("%s: output tiles %d and %d are both in lane %d of row %d", s.Name, o, other, m.lane, row)
					}
					taken[place{m.lane, row}] = o
				}
			}
			for w, pieces := range s.Workers {
				for _, k := range pieces {
					if m := merges[k.Output]; k.whole() != (m == nil) || m != nil && (!slices.Contains(m.workers, w) || k.host() && m.host != w) {
						t.Fatalf("%s, worker %d: %+v and %+v", s.Name, w, k, m)
					}
				}
			}
		}
	})
}

// TestJSON: all pieces, and what they come to.
func TestJSON(t *testing.T) {
	file := filepath.Join(t.TempDir(), "s.json")
	run(t, "-json", file)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var got []struct {
		schedule
		Longest         int64
		Occupancy       float64
		Waves, Partials int
	}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if len(got) != len(policyNames) {
		t.Fatalf("%d schedules", len(got))
	}
	for _, r := range got {
		if r.busy() == 0 || r.Longest != r.span() || r.Occupancy != r.occupancy() || r.Waves != r.waves() || r.Partials != r.partials() {
			t.Errorf("%+v", r)
		}
	}
}
