package report

import (
	"bytes"
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// paperLimit is the maximum size of docs/paper.md, in bytes.
const paperLimit = 30 << 10

const paperHead = `# The LeanAttention paper's evaluation

<!-- written by leanbench report docs/benchmarks/*.json: change the JSON, or cmd/leanbench/report -->

This page repeats the figures of section VI of [Sanovar et al., arXiv:2405.10480](https://arxiv.org/abs/2405.10480). ` + "`go -C cmd/leanbench run . paper -quick`" + ` measures some shapes of each in two minutes, on a GPU if there is one; ` + "`paper`" + ` measures all.

- A table has the least and the largest value over a figure's shapes. The pictures have every shape, the JSON every value.
- "x" is a speedup: the other program's time divided by ours, the median over neighbouring turns.
- FlashDecoding is PyTorch's FLASH_ATTENTION, newer than the paper's. FlashInfer is its fastest decode kernel, with pages of 16.
- "Fixed split" and "per head" are our kernels with the schedules of FlashDecoding and FlashAttention-2: these ratios show the schedule alone. Fixed split has the splits of FlashAttention 2.5.6, which the paper measured.
- Keys and values are float16 on a GPU and float32 on a CPU. The ceiling is a kernel that only reads the same bytes.

`

// ofPaper reports whether r belongs to docs/paper.md: a figure of the paper, the paper's own numbers, or the
// scale command's measurement of figure 9.
func ofPaper(r *measure.Report) bool {
	return strings.HasPrefix(r.Command+" ", "paper ") || r.Command == "scale"
}

// PaperPage returns the page of one report and the pictures beside it, keyed by file name.
func PaperPage(name string, r *measure.Report) (map[string][]byte, error) {
	t := newTables()
	base := strings.TrimSuffix(filepath.Base(name), filepath.Ext(name))
	if err := t.add(base, r); err != nil {
		return nil, err
	}
	files := make(map[string][]byte)
	return files, paperFiles(name, filepath.Dir(name), []*tables{t}, files)
}

// paperFiles adds the page and its pictures to files. The pictures are in folder.
func paperFiles(page, folder string, all []*tables, files map[string][]byte) error {
	w, err := newPaper(all)
	if err != nil {
		return err
	}
	if w.folder, err = filepath.Rel(filepath.Dir(page), folder); err != nil {
		return err
	}
	w.WriteString(paperHead)
	w.writeBusy()
	w.writeClaims()
	w.writeLosses()
	for _, q := range paperQuestions {
		if err := w.writeFigure(q, folder, files); err != nil {
			return err
		}
	}
	w.WriteString("\n## Runs\n\n")
	for _, t := range all {
		fmt.Fprintf(w, "- [%s](%s): %s\n", t.name(), w.link(t.name()+".json"), paperSource(t.order[0]))
	}
	if w.Len() > paperLimit {
		return fmt.Errorf("%s has %d bytes, and may have %d", page, w.Len(), paperLimit)
	}
	files[page] = w.Bytes()
	return nil
}

// paperSource describes the source of a report's figures, with the programs that the figures compare with.
func paperSource(r *measure.Report) string {
	short := *r
	short.Notes = nil
	missing, hosts := false, ""
	for i, n := range r.Notes {
		programs := strings.HasPrefix(n, "PyTorch ") || strings.HasPrefix(n, "transformers ")
		// Several runs may repeat a note, and one run may name fewer programs than another.
		said := slices.Contains(r.Notes[:i], n) || slices.ContainsFunc(r.Notes, func(o string) bool { return strings.HasPrefix(o, n) && o != n })
		if programs && !said {
			short.Notes = append(short.Notes, n)
		}
		if other, ok := strings.CutPrefix(n, "on another host, "); ok {
			hosts += " On another host, " + other + "."
		}
		missing = missing || strings.Contains(n, "without FlashInfer: ")
	}
	text := source(&short) + hosts
	if missing {
		text += " FlashInfer was not there."
	}
	return text
}

// paper is the page under construction.
type paper struct {
	bytes.Buffer
	folder    string // folder of JSON and pictures, relative to the page
	runs      []*tables
	published *tables // nil: the paper's own figures are missing
}

func newPaper(all []*tables) (*paper, error) {
	w := new(paper)
	for _, t := range all {
		for _, f := range t.order[0].Figures {
			if f.Table != PaperAll && questionOf(f) == nil {
				return nil, fmt.Errorf("%s: docs/paper.md shows no table %q with %q", t.name(), f.Table, f.Case)
			}
		}
		if t.order[0].Transcribed != "" {
			w.published = t
			continue
		}
		w.runs = append(w.runs, t)
	}
	slices.SortStableFunc(w.runs, func(a, b *tables) int { return strings.Compare(a.ours(), b.ours()) }) // GPUs first
	return w, nil
}

// questionOf returns the question that shows a figure, or nil if there is none.
func questionOf(f measure.Figure) *question {
	i := slices.IndexFunc(paperQuestions, func(q question) bool { return q.shows(f) })
	if i < 0 {
		return nil
	}
	return &paperQuestions[i]
}

// shows reports whether the question shows the figure.
func (q question) shows(f measure.Figure) bool {
	return slices.Contains(q.tables, f.Table) && (q.only == nil || q.only.MatchString(f.Case))
}

// short returns the paper's name of the figure, or else the question's title.
func (q question) short() string {
	if figure := "Figure " + q.id; strings.HasPrefix(q.title, figure+":") {
		return figure
	}
	return q.title
}

func (w *paper) link(name string) string { return filepath.ToSlash(filepath.Join(w.folder, name)) }

// name returns the name of the only report.
func (t *tables) name() string { return t.names[t.order[0]] }

// device returns a short name of the measured device: "H100" for "NVIDIA H100 80GB HBM3", or "CPU". The JSON
// has the full name.
func (t *tables) device() string {
	m := t.order[0].Machine
	if m.GPU == "" {
		return "CPU"
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(m.GPU, "NVIDIA "), " 80GB")
	return name
}

// ours returns leanattention's contender in a run.
func (t *tables) ours() string {
	if t.order[0].Machine.GPU != "" {
		return lean
	}
	return attend
}

// most returns leanattention's contender in a case. With several numbers of GPUs, most returns the contender
// with the most GPUs, which is the last one.
func (t *tables) most(table, is string) string {
	who := lean
	for _, f := range t.figures[table] {
		if f.Case == is && strings.HasSuffix(f.Contender, " GPUs") {
			who = f.Contender
		}
	}
	return who
}

// busy is the load per core above which a machine's figures are imprecise.
const busy = 0.75

// writeBusy warns of runs during which other programs used the machine.
func (w *paper) writeBusy() {
	for _, t := range w.runs {
		if m := t.order[0].Machine; m.GPU == "" && m.Load > busy*float64(m.Cores) {
			fmt.Fprintf(w, "Other programs used the machine during %s (%d cores, load %.1f), so a ratio of that run near 1 means no difference.\n\n", t.name(), m.Cores, m.Load)
		}
	}
}

// writeClaims writes the paper's numbers beside the numbers measured here.
func (w *paper) writeClaims() {
	if w.published == nil || len(w.runs) == 0 {
		return
	}
	w.WriteString("## What the paper says\n\n| of | against | paper | on |")
	var devices []string // one entry per device: a GPU may have several runs
	for _, t := range w.runs {
		if t.ours() == lean && !slices.Contains(devices, t.device()) { // the paper measures no CPU
			devices = append(devices, t.device())
			fmt.Fprintf(w, " here, %s | by the schedule alone |", t.device())
		}
	}
	fmt.Fprintf(w, "\n|---|---|---|---|%s\n", strings.Repeat("---|---|", len(devices)))
	for _, f := range w.published.order[0].Figures {
		of, against, alone := f.Table+", "+f.Case, string(f.Metric), measure.OverFixed
		if q := questionOf(f); q != nil && f.Table != "Figure "+q.id { // the table's name is long
			of = q.title + ", " + f.Case
		}
		if f.Metric == measure.OverPerHead {
			alone = f.Metric // the paper compares with this schedule
		}
		if table, model, ok := strings.Cut(f.Table, ", "); ok && strings.HasPrefix(f.Case, model+", ") {
			of = table + ", " + f.Case
		}
		find := func(t *tables) (there, schedule *measure.Figure) {
			who := t.most(f.Table, f.Case)
			return t.find(f.Table, f.Case, who, f.Metric), t.find(f.Table, f.Case, who, alone)
		}
		if f.Table == PaperAll {
			of, against = string(f.Metric)+" of all shapes", f.Case
			find = func(t *tables) (there, schedule *measure.Figure) {
				return t.find(f.Table, f.Case, lean, f.Metric), t.find(f.Table, string(alone), lean, f.Metric)
			}
		}
		fmt.Fprintf(w, "| %s | %s | %.2f | %s |", of, strings.TrimPrefix(against, "x "), f.Value, strings.TrimPrefix(f.Contender, publishedBy))
		for _, device := range devices {
			var there, schedule *measure.Figure
			for _, t := range w.runs {
				if there == nil && schedule == nil && t.device() == device {
					there, schedule = find(t)
				}
			}
			for _, g := range []*measure.Figure{there, schedule} {
				text := ""
				if g != nil {
					text = fmt.Sprintf("%.2f", g.Value)
				}
				fmt.Fprintf(w, " %s |", text)
			}
		}
		w.WriteByte('\n')
	}
	fmt.Fprintf(w, "\nThe paper's figures are from %s: [JSON](%s).\n\n", w.published.order[0].Transcribed, w.link(w.published.name()+".json"))
}

// losing lists the ratios that count as a loss below 1.
var losing = []measure.Metric{measure.OverFlash, measure.OverVarlen, measure.OverInfer, measure.OverCUDNN, measure.OverStock, measure.OverTorch, measure.OverFixed, measure.OverPerHead}

// writeLosses lists the comparisons in which leanattention is slower, and the missed bars.
func (w *paper) writeLosses() {
	w.WriteString("## Where ours is slower\n\n")
	said := false
	for _, t := range w.runs {
		names, lost := "", "" // the peers, and the rest of the line
		flush := func() {
			if names != "" {
				fmt.Fprintf(w, "- %s, against %s: %s.\n", t.device(), names, lost)
			}
		}
		for _, m := range losing {
			of := func(what measure.Metric) float64 {
				if f := t.find(PaperAll, string(m), lean, what); f != nil {
					return f.Value
				}
				return 0
			}
			slower, all, least := of("slower"), of("shapes"), of("least")
			if slower == 0 {
				continue
			}
			said = true
			where := ""
			for _, f := range t.order[0].Figures {
				if f.Table != PaperAll && f.Metric == m && f.Value == least {
					where = fmt.Sprintf(" (%s: %s)", f.Table, f.Case)
					break
				}
			}
			name, text := strings.TrimPrefix(against(m), "x "), fmt.Sprintf("%.0f of %.0f shapes, least %.2f%s", slower, all, least, where)
			if names != "" && text == lost {
				names += " and " + name
				continue
			}
			flush()
			names, lost = name, text
		}
		flush()
		for _, q := range paperQuestions {
			said = w.writeOwnLosses(t, q) || said
		}
	}
	for _, t := range w.runs {
		for _, q := range paperQuestions {
			said = w.writeMissedBars(t, q) || said
		}
	}
	if !said {
		w.WriteString("Nowhere, of these shapes.\n")
	}
}

// writeMissedBars writes how many bars of a figure a run misses, and the figure that misses its bar by the
// largest factor.
func (w *paper) writeMissedBars(t *tables, q question) (said bool) {
	bars, missed, by := 0, 0, 0.0
	var furthest measure.Figure
	for _, f := range t.order[0].Figures {
		if f.Bar == nil || !q.shows(f) {
			continue
		}
		if bars++; f.Bar.Met {
			continue
		}
		missed++
		if _, far := q.limit(f); far > by {
			furthest, by = f, far
		}
	}
	if missed == 0 {
		return false
	}
	limit, _, _ := strings.Cut(furthest.Bar.Text(furthest.Metric), ":")
	where, bound := furthest.Case, ""
	if furthest.Contender != lean {
		where += ", " + furthest.Contender
	}
	if c := t.find(furthest.Table, furthest.Case, measure.ReadCeiling, furthest.Metric); c != nil {
		bound = fmt.Sprintf("; a kernel that only reads has %s", c.Metric.Format(c.Value))
	}
	fmt.Fprintf(w, "- %s, %s: %d of %d bars missed, the furthest %s %s, bar %s (%s%s).\n",
		t.device(), q.short(), missed, bars, furthest.Metric.Format(furthest.Value), furthest.Metric, limit, where, bound)
	return true
}

// writeOwnLosses lists the losses in figures that the table PaperAll does not cover: figures with a line per
// contender, and all figures of a run without that table.
func (w *paper) writeOwnLosses(t *tables, q question) (said bool) {
	var metrics []measure.Metric
	for _, c := range q.columns {
		leftOut := q.contenders || t.figures[PaperAll] == nil
		if !leftOut || slices.Contains(metrics, c.metric) || c.metric != measure.OverCompiled && !slices.Contains(losing, c.metric) {
			continue
		}
		metrics = append(metrics, c.metric)
		var all, slower []measure.Figure
		for _, f := range t.order[0].Figures {
			if f.Metric != c.metric || !q.shows(f) {
				continue
			}
			if all = append(all, f); f.Value < SameSpeed {
				slower = append(slower, f)
			}
		}
		if len(slower) == 0 {
			continue
		}
		said = true
		f := slices.MinFunc(slower, func(a, b measure.Figure) int { return cmp.Compare(a.Value, b.Value) })
		where := f.Case
		if f.Contender != lean {
			where += ", " + f.Contender
		}
		fmt.Fprintf(w, "- %s, %s, against %s: %d of %d, least %.2f (%s).\n", t.device(), q.short(), strings.TrimPrefix(against(c.metric), "x "), len(slower), len(all), f.Value, where)
	}
	return w.writePromptLosses(t, q) || said
}

// writePromptLosses writes how many prompts take longer than in transformers.
func (w *paper) writePromptLosses(t *tables, q question) bool {
	all, slower, least := 0, 0, 1.0
	var ours, theirs *measure.Figure // the pair with the smallest ratio
	for _, table := range q.tables {
		for _, f := range t.figures[table] {
			if f.Metric != measure.PromptMillis || f.Contender != compiled {
				continue
			}
			own := t.find(table, f.Case, lean, f.Metric)
			if own == nil {
				continue
			}
			all++
			if ratio := f.Value / own.Value; ratio < SameSpeed {
				slower++
				if ratio < least {
					least, ours, theirs = ratio, own, &f
				}
			}
		}
	}
	if slower == 0 {
		return false
	}
	fmt.Fprintf(w, "- %s, %s, a prompt without its tokens, against %s: %d of %d, the furthest %s ms to %s ms (%s).\n",
		t.device(), q.short(), compiled, slower, all, digits(ours.Value), digits(theirs.Value), ours.Case)
	return true
}

// against returns the page's name of the peer in a ratio.
func against(m measure.Metric) string {
	for _, c := range paperColumns {
		if c.metric == m {
			return c.head
		}
	}
	return string(m)
}

// writeFigure writes a figure's pictures and a table with a line for each run.
func (w *paper) writeFigure(q question, folder string, files map[string][]byte) error {
	var runs []*tables
	for _, t := range w.runs {
		if slices.ContainsFunc(t.order[0].Figures, q.shows) {
			runs = append(runs, t)
		}
	}
	if len(runs) == 0 {
		return nil
	}
	fmt.Fprintf(w, "\n## %s\n\n%s\n\n", q.title, q.text)
	for _, t := range runs {
		svg, err := t.draw(t.only(q))
		if err != nil {
			return fmt.Errorf("%s, %s: %w", t.name(), q.id, err)
		}
		picture := fmt.Sprintf("%s-%s.svg", t.name(), q.id)
		files[filepath.Join(folder, picture)] = svg
		fmt.Fprintf(w, "![%s](%s)\n", t.device(), w.link(picture))
	}
	writeRanges(&w.Buffer, q, runs)
	return nil
}

// writeRanges writes a table with a line for each run and the range of each column.
func writeRanges(w *bytes.Buffer, q question, runs []*tables) {
	var heads []string
	cells := make([]map[string]string, len(runs)) // per run, keyed by column head
	for i, t := range runs {
		cells[i] = make(map[string]string)
		rows := t.rows(q.byWho(), q.tables...)
		for _, c := range q.columns {
			if text := c.between(rows); text != "" {
				cells[i][c.head] = text
			}
		}
	}
	for _, c := range q.columns {
		there := func(of map[string]string) bool { return of[c.head] != "" }
		if !slices.Contains(heads, c.head) && slices.ContainsFunc(cells, there) {
			heads = append(heads, c.head)
		}
	}
	fmt.Fprintf(w, "\n| on | %s |\n|---%s|\n", strings.Join(heads, " | "), strings.Repeat("|---", len(heads)))
	for i, t := range runs {
		fmt.Fprintf(w, "| %s |", t.device())
		for _, head := range heads {
			fmt.Fprintf(w, " %s |", cells[i][head])
		}
		w.WriteByte('\n')
	}
}

// byWho returns the question with one row per case. The columns name the contenders.
func (q question) byWho() question {
	q.contenders = false
	return q
}

// between formats the smallest and the largest value of a column in rows. The text is bold if a figure misses
// its bar, and empty if there are no figures.
func (c column) between(rows []row) string {
	var all []measure.Figure
	for _, r := range rows {
		if f := r.cells[cellKey(c.series, c.who, c.metric)]; f != nil {
			all = append(all, *f)
		}
	}
	if len(all) == 0 {
		return ""
	}
	order := func(a, b measure.Figure) int { return cmp.Compare(a.Value, b.Value) }
	least, most := c.text(slices.MinFunc(all, order)), c.text(slices.MaxFunc(all, order))
	if least == most {
		return least
	}
	return least + "–" + most
}

// only returns the question without the series that the run has no figures of.
func (t *tables) only(q question) question {
	none := func(rows []row) func(c column) bool {
		return func(c column) bool {
			return !slices.ContainsFunc(rows, func(r row) bool { return r.cells[cellKey(c.series, c.who, c.metric)] != nil })
		}
	}
	drawn := t.rows(q.drawn(), q.tables...)
	q.picture.series = slices.DeleteFunc(slices.Clone(q.picture.series), none(drawn))
	q.title = q.title + ", " + t.device()
	return q
}
