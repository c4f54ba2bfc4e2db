package measure

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// answerTime is the default limit for an answer. Some workers load models, and some process thousands of
// tokens.
const answerTime = 15 * time.Minute

// Worker is another process that runs measurements on request, so that programs in other languages can
// alternate with this process. A question is a line of words on the worker's standard input. The answer is a
// line on its standard output:
//
//	ok WORD ...
//	error TEXT
//
// The worker prints ok once when it is ready, and exits when its input ends.
type Worker struct {
	command *exec.Cmd
	in      io.WriteCloser
	lines   chan string // closed when the worker's output ends
	Stderr  tail
	Hello   []string // words of the first ok
	// Patience is the longest wait for an answer. 0 means answerTime.
	Patience time.Duration
	// Gone reports that the worker gives no more answers: it has exited, or was killed because an answer took
	// longer than Patience.
	Gone    bool
	closing sync.Once
	end     error
}

// StartWorker starts python with the program and its arguments.
func StartWorker(python, program string, args ...string) (*Worker, error) {
	return Start(exec.Command(python, append([]string{"-u", "-c", program}, args...)...))
}

// Start starts a command as a worker. An interrupt of the terminal does not reach the worker and its
// children, so an interrupted measurement can finish the current shape. The worker exits when this process
// does, because its input then ends.
func Start(c *exec.Cmd) (*Worker, error) {
	w := &Worker{command: c, lines: make(chan string)}
	apart(c)
	c.Stderr = &w.Stderr
	// Children of the worker may keep the pipes open. WaitDelay limits the wait for the pipes.
	c.WaitDelay = time.Second
	in, err := c.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	w.in = in
	go func() {
		defer close(w.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			w.lines <- s.Text()
		}
	}()
	if w.Hello, err = w.answer(); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// Again starts the program of a worker that is gone once more. The new process has no state of the old one.
func (w *Worker) Again() (*Worker, error) {
	w.Close() // the error was reported when the worker went
	old := w.command
	c := exec.Command(old.Path)
	c.Args, c.Env, c.Dir = old.Args, old.Env, old.Dir
	next, err := Start(c)
	if err != nil {
		return nil, err
	}
	next.Patience = w.Patience
	return next, nil
}

// TorchSettle is longer than the time for which PyTorch's idle threads spin.
const TorchSettle = 30 * time.Millisecond

// Steps returns the Run of a contender in the worker. The number of steps is the last word of the question,
// and the total time is the first word of the answer.
func (w *Worker) Steps(format string, args ...any) func(n int) (time.Duration, error) {
	return func(n int) (time.Duration, error) {
		t, _, err := w.Seconds(1, format+" %d", append(slices.Clone(args), n)...)
		if err != nil {
			return 0, err
		}
		return t[0], nil
	}
}

// Ask sends a question and returns the words of the answer after ok.
func (w *Worker) Ask(format string, args ...any) ([]string, error) {
	question := fmt.Sprintf(format, args...)
	if w.Gone {
		return nil, fmt.Errorf("%q: the worker is gone", question)
	}
	if _, err := io.WriteString(w.in, question+"\n"); err != nil {
		w.Gone = true
		return nil, fmt.Errorf("%q: %w%s", question, err, w.Stderr.Text())
	}
	words, err := w.answer()
	if err != nil {
		return nil, fmt.Errorf("%q: %w", question, err)
	}
	return words, nil
}

func (w *Worker) answer() ([]string, error) {
	patience := w.Patience
	if patience == 0 {
		patience = answerTime
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case line, more := <-w.lines:
		words := strings.Fields(line)
		switch {
		case !more:
			w.Gone = true
			w.Close() // waits until all of stderr is read
			return nil, fmt.Errorf("the worker has ended%s", w.Stderr.Text())
		case len(words) == 0 || words[0] != "ok":
			return nil, fmt.Errorf("the worker says %q%s", line, w.Stderr.Text())
		}
		return words[1:], nil
	case <-timer.C:
		// A late answer would be taken for the answer to a later question, so the worker is killed.
		w.Gone = true
		w.command.Process.Kill()
		w.Close()
		return nil, fmt.Errorf("the worker is silent for %v%s", patience, w.Stderr.Text())
	}
}

// Seconds asks a question whose answer begins with count times in seconds. rest holds the remaining words.
func (w *Worker) Seconds(count int, format string, args ...any) (times []time.Duration, rest []string, err error) {
	words, err := w.Ask(format, args...)
	if err != nil {
		return nil, nil, err
	}
	if len(words) < count {
		return nil, nil, fmt.Errorf("the worker says %q, and %d times are needed", words, count)
	}
	for _, s := range words[:count] {
		f, err := strconv.ParseFloat(s, 64)
		if err != nil {
			return nil, nil, fmt.Errorf("the worker says %q: %w", words, err)
		}
		times = append(times, time.Duration(f*float64(time.Second)))
	}
	return times, words[count:], nil
}

// Close closes the worker's input and waits for the worker to exit, and kills it after five seconds. Further
// calls return the same error.
func (w *Worker) Close() error {
	w.closing.Do(func() {
		w.in.Close()
		force := time.AfterFunc(5*time.Second, func() { w.command.Process.Kill() })
		defer force.Stop()
		for range w.lines {
			// Unread lines would block the worker.
		}
		if err := w.command.Wait(); err != nil {
			w.end = fmt.Errorf("worker: %w", err)
		}
	})
	return w.end
}

// tail keeps the last 4000 bytes written to it.
type tail struct {
	mu   sync.Mutex
	data []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.data = append(t.data, p...)
	if over := len(t.data) - 4000; over > 0 {
		t.data = t.data[over:]
	}
	return len(p), nil
}

// Text returns the kept bytes as the end of an error message, or an empty string.
func (t *tail) Text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := bytes.TrimSpace(t.data); len(s) > 0 {
		return ":\n" + string(s)
	}
	return ""
}
