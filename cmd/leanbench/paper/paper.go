// Package paper measures what the LeanAttention paper's evaluation does (Sanovar et al.,
// arXiv:2405.10480, section VI), on this machine's GPU or cores.
package paper

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// Commands are those of this package.
var Commands = []command.Command{
	{Name: "paper", Summary: "the figures of the LeanAttention paper, on a GPU or on cores: name some, or get all", Setup: measurePaper, Args: true},
}

// options are the flags of the paper command.
type options struct {
	*measure.Options
	device, python, resume, page string
	peers                        bool
	again                        *regexp.Regexp // nil: nothing
	figures                      []panel
}

// measurePaper measures figures of the paper one after the other.
func measurePaper(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	o := options{Options: measure.Flags(flags)}
	// A user's machine may have one core, or many.
	o.Workers = runtime.NumCPU()
	flags.Lookup("workers").DefValue = fmt.Sprint(o.Workers)
	flags.StringVar(&o.device, "device", "", "`where` to measure: gpu or cpu (default: a GPU, if there is one)")
	flags.StringVar(&o.python, "python", "", "`path` of a python that has PyTorch (default: python3 for a GPU, none for cores); peers/setup.sh makes one and prints it")
	flags.BoolVar(&o.peers, "peers", true, "measure PyTorch and FlashInfer, where they are")
	flags.StringVar(&o.resume, "resume", "", "`file` of a measurement that was interrupted: what is in it is not measured again; the rest is written there, too, unless -json names another one. Of several, with commas between, the first is written")
	flags.Func("again", "with -resume: shapes whose line, such as 'Figure 8a: b6, 48 heads x 262144 x 64', matches the `regexp` are measured again, as some may have lacked peers", func(text string) (err error) {
		o.again, err = regexp.Compile(text)
		return err
	})
	flags.StringVar(&o.page, "page", "", "`file` to write a page in Markdown to, with pictures beside it")
	flags.Usage = func() { usage(flags) }
	schema := flags.Bool("schema", false, "print the JSON Schema of what -json writes, and measure nothing")
	return func(stdout, stderr io.Writer) (err error) {
		if *schema {
			_, err := stdout.Write(Schema)
			return err
		}
		if o.figures, err = chosen(flags.Args()); err != nil {
			return err
		}
		if o.again != nil && o.resume == "" {
			return errors.New("-again says nothing without -resume")
		}
		return o.run(context.Background(), stdout, stderr)
	}
}

// usage lists figures and flags.
func usage(flags *flag.FlagSet) {
	w := flags.Output()
	fmt.Fprintln(w, "usage: leanbench paper [flags] [FIGURE ...]\n\nfigures, which are measured in the order in which they are named (7 is all of 7a, 7b and 7c; without any, all):")
	for _, p := range panels() {
		var on []string
		if len(p.gpu) > 0 {
			on = append(on, "GPU")
		}
		if len(p.cpu) > 0 {
			on = append(on, "CPU")
		}
		fmt.Fprintf(w, "  %-9s %s (%s)\n", p.id, p.what, strings.Join(on, ", "))
	}
	fmt.Fprintln(w, "\nflags:")
	flags.PrintDefaults()
}

// bench is what measures the panels of one kind of machine.
type bench interface {
	report() *measure.Report
	// points are those of a panel that there are here, and how long each takes, in any unit.
	points(p panel) ([]point, []float64)
	// begin gets ready for some points. What keeps a panel from being measured is an error.
	begin(all []item) error
	measure(p panel, x point) error
	end() // behind the last point
	close() error
}

// item is a point to measure.
type item struct {
	panel panel
	point point
	cost  float64
}

// errLeftOut is a panel that can't be measured here: the others can.
type errLeftOut struct{ why string }

func (e errLeftOut) Error() string { return e.why }

func leftOut(format string, args ...any) error { return errLeftOut{fmt.Sprintf(format, args...)} }

// run measures what the flags say.
func (o *options) run(ctx context.Context, stdout, stderr io.Writer) (err error) {
	for _, name := range []string{o.JSON, o.page} { // before anything is measured
		if _, err := os.Stat(filepath.Dir(name)); name != "" && err != nil {
			return err
		}
	}
	earlier := make(map[string]*measure.Report)
	for _, name := range measure.Fields(o.resume) {
		r, err := measure.Load(name)
		if err == nil {
			earlier[name] = r
		} else if !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if o.JSON == "" {
			o.JSON = name
		}
	}
	b, err := o.open(stdout, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	r := b.report()
	for _, name := range measure.Fields(o.resume) {
		if err := resume(r, earlier[name]); err != nil {
			return fmt.Errorf("-resume %s: %w", name, err)
		}
	}
	// Until there are figures an interrupt ends the program. So does a second one.
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	todo, known := o.items(b, stderr)
	if len(todo) == 0 && known == 0 {
		return fmt.Errorf("figures %s: there is nothing to measure", strings.Join(ids(o.figures), ", "))
	}
	if err := b.begin(todo); err != nil {
		return err
	}
	r.WriteHead(stdout)
	said := len(r.Notes)
	measured, err := o.measure(ctx, b, todo, known, stderr)
	said = forgetNotes(r, said, measured)
	b.end()
	inOrder(r)
	summarize(r)
	for _, p := range panels() {
		if has(r, p.table) {
			r.WriteTable(stdout, p.table)
		}
	}
	if has(r, tableAll) {
		r.WriteTable(stdout, tableAll)
	}
	if notes := r.Notes[min(said, len(r.Notes)):]; len(notes) > 0 { // what came up on the way
		fmt.Fprintf(stdout, "\n- %s\n", strings.Join(notes, "\n- "))
	}
	r.WriteVerdict(stdout)
	if len(r.Figures) > 0 {
		err = errors.Join(err, r.Save(o.JSON))
	}
	if o.page != "" && len(r.Figures) > 0 {
		err = errors.Join(err, writePage(o.page, r))
	}
	return err
}

// items are the points that are not there yet, and how many are.
func (o *options) items(b bench, stderr io.Writer) (todo []item, known int) {
	for _, p := range o.figures {
		points, costs := b.points(p)
		switch {
		case len(points) == 0:
			fmt.Fprintf(stderr, "%s is left out: it is not measured on this device\n", p.table)
		case o.Quick && !slices.ContainsFunc(points, func(x point) bool { return x.quick }):
			fmt.Fprintf(stderr, "%s is left out: it takes too long for -quick\n", p.table)
		}
		for i, x := range points {
			switch {
			case o.Quick && !x.quick:
			case b.report().HasCase(p.table, x.label) && (o.again == nil || !o.again.MatchString(p.table+": "+x.label)):
				known++
			default:
				todo = append(todo, item{p, x, costs[i]})
			}
		}
	}
	return todo, known
}

// forgetNotes drops what the first notes, so many, say of shapes of which all has been measured since: what they lacked may
// have been there. It returns how many of them are left.
func forgetNotes(r *measure.Report, first int, measured []item) int {
	// A case may have a name in front of its shape.
	has := func(label, is string) bool { return label == is || strings.HasSuffix(label, ", "+is) }
	again := make(map[[2]string]bool)
	for _, x := range measured {
		again[[2]string{x.panel.table, x.point.label}] = true
	}
	old := slices.DeleteFunc(slices.Clone(r.Notes[:first]), func(note string) bool {
		is, _, ok := gpu.CutMissing(note)
		if !ok || !slices.ContainsFunc(measured, func(x item) bool { return has(x.point.label, is) }) {
			return false
		}
		return !slices.ContainsFunc(r.Figures, func(f measure.Figure) bool { return has(f.Case, is) && !again[[2]string{f.Table, f.Case}] })
	})
	r.Notes = append(old, r.Notes[first:]...)
	return len(old)
}

// mostFailures is after how many failed points a measurement ends.
const mostFailures = 3

// measure goes through all points, and saves what there is after each. It returns those that were measured.
func (o *options) measure(ctx context.Context, b bench, todo []item, known int, stderr io.Writer) (measured []item, err error) {
	var failed []error
	out := make(map[string]bool)
	clock := newProgress(todo)
	for i, x := range todo {
		if ctx.Err() != nil {
			return measured, errors.Join(append(failed, fmt.Errorf("interrupted: %d of %d shapes were measured; -resume goes on", known+i, known+len(todo)))...)
		}
		if out[x.panel.id] {
			clock.skip(x)
			continue
		}
		fmt.Fprintf(stderr, "[%d/%d] %s: %s%s\n", known+i+1, known+len(todo), x.panel.table, x.point.label, clock.left())
		began := time.Now()
		err := measureAnew(b, x)
		clock.done(x, time.Since(began))
		var left errLeftOut
		switch {
		case errors.As(err, &left):
			out[x.panel.id] = true
			b.report().Notes = append(b.report().Notes, fmt.Sprintf("%s is left out: %v", x.panel.table, err))
			fmt.Fprintf(stderr, "%s is left out: %v\n", x.panel.table, err)
			continue
		case err != nil:
			failed = append(failed, fmt.Errorf("%s: %s: %w", x.panel.table, x.point.label, err))
			fmt.Fprintln(stderr, failed[len(failed)-1])
			if len(failed) == mostFailures {
				return measured, errors.Join(failed...)
			}
		default:
			measured = append(measured, x)
		}
		if len(b.report().Figures) > 0 {
			if err := b.report().Save(o.JSON); err != nil {
				return measured, err
			}
		}
	}
	return measured, errors.Join(failed...)
}

// measureAnew measures a point in place of what there is of it. That stays, and nothing comes to it, if it fails.
func measureAnew(b bench, x item) error {
	r := b.report()
	before := slices.Clone(r.Figures)
	r.Drop(x.panel.table, x.point.label)
	err := b.measure(x.panel, x.point)
	if err != nil || !r.HasCase(x.panel.table, x.point.label) {
		r.Figures = before
	}
	return err
}

// inOrder has figures be in the order of the panels and their shapes, whatever run has measured them.
func inOrder(r *measure.Report) {
	type key struct{ table, is string }
	places := make(map[key]int)
	for _, p := range panels() {
		for _, x := range slices.Concat(p.gpu, p.cpu) {
			if k := (key{p.table, x.label}); places[k] == 0 {
				places[k] = len(places) + 1
			}
		}
	}
	place := func(f measure.Figure) int {
		if n := places[key{f.Table, f.Case}]; n > 0 {
			return n
		}
		return len(places) + 1
	}
	slices.SortStableFunc(r.Figures, func(a, b measure.Figure) int { return place(a) - place(b) })
}

// progress estimates how long the rest takes.
type progress struct {
	rest, spent float64 // in the unit of costs
	took        time.Duration
}

func newProgress(todo []item) *progress {
	p := new(progress)
	for _, x := range todo {
		p.rest += x.cost
	}
	return p
}

func (p *progress) done(x item, took time.Duration) {
	p.rest, p.spent, p.took = p.rest-x.cost, p.spent+x.cost, p.took+took
}

func (p *progress) skip(x item) { p.rest -= x.cost }

// left is what a line says of it; nothing before anything was measured.
func (p *progress) left() string {
	if p.spent == 0 {
		return ""
	}
	return ", about " + time.Duration(p.rest/p.spent*float64(p.took)).Round(time.Second).String() + " left"
}

// has says whether a report has figures of a table.
func has(r *measure.Report, table string) bool {
	for i := range r.Figures {
		if r.Figures[i].Table == table {
			return true
		}
	}
	return false
}

// resume puts what an earlier run has measured into a report, if it was the same machine, but for cases that are there. What a
// GPU is measured for depends on it alone: another host of the same GPU and driver is named in a note.
func resume(r, old *measure.Report) error {
	if old == nil {
		return nil
	}
	if old.Command != r.Command {
		return fmt.Errorf("it is of leanbench %s, and this is leanbench %s", old.Command, r.Command)
	}
	then, now := old.Machine, r.Machine
	then.Load, now.Load = 0, 0
	host := then != now && then.GPU != "" && then.GPU == now.GPU
	if then != now && !host {
		return fmt.Errorf("it was measured on %s, and this is %s", then, now)
	}
	for name, is := range old.Versions {
		if here, ok := r.Versions[name]; ok && here != is {
			return fmt.Errorf("it was measured with %s %s, and this is %s", name, is, here)
		}
	}
	for name, is := range old.Versions { // of programs that are not here now
		if r.Versions == nil {
			r.Versions = make(map[string]string)
		}
		r.Versions[name] = is
	}
	there, taken := *r, make(map[string]bool) // tables
	for _, f := range old.Figures {
		if f.Table != tableAll && !there.HasCase(f.Table, f.Case) { // it is made anew
			r.Figures = append(r.Figures, f)
			taken[f.Table] = true
		}
	}
	if host && len(taken) > 0 {
		var of []panel
		for _, p := range panels() {
			if taken[p.table] {
				of = append(of, p)
			}
		}
		then.Load = -1
		r.Notes = append(r.Notes, fmt.Sprintf("on another host, %s: figures %s", then, strings.Join(ids(of), ", ")))
	}
	r.Date, r.Clocks = old.Date, append(r.Clocks, old.Clocks...)
	for _, n := range old.Notes {
		add := true
		for _, there := range r.Notes {
			add = add && there != n
		}
		if add {
			r.Notes = append(r.Notes, n)
		}
	}
	return nil
}
