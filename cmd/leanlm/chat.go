package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/chat"
	"gorgonia.org/leanattention/decoder/tokenizer"
)

// conversation is the flags of leanlm chat.
type conversation struct {
	model    modelFlags
	sampling samplingFlags
	long     longFlags
	system   string
	tools    string
	tokens   int
	stops    []string
	special  bool
	draft    int
	stats    bool
}

const chatAbout = `chat has a conversation with a model that has a chat template. Each line of standard input is a message, and a
line that ends with \ goes on in the next line. Answers go to standard output. Ctrl-C ends an answer.

` + sessionHelp

const sessionHelp = `Lines that begin with / are commands. A message that begins with / begins with //.
  /undo   drops the last message and its answer
  /clear  drops all messages
  /fork   keeps the conversation as it is now, for /back
  /back   returns to the conversation of the last /fork
  /help   lists the commands
  /quit   ends the conversation, as Ctrl-D does
`

var sessionCommands = []string{"/undo", "/clear", "/fork", "/back", "/help", "/quit"}

// session is a conversation. Keys and values of its messages stay in the engine's cache.
type session struct {
	flags     conversation
	std       streams
	live      bool // standard input is a terminal
	model     *opened
	engine    *decoder.Engine
	templates *chat.Templates
	tools     []json.RawMessage
	ends      []int
	sampling  decoder.Sampling

	messages   []chat.Message
	turns      []int // number of messages before each question
	forks      []fork
	asked      int
	unanswered int
}

// fork is the state that /back returns to.
type fork struct {
	messages []chat.Message
	turns    []int
}

// talk has a conversation.
func talk(ctx context.Context, args []string, std streams) (err error) {
	s := &session{std: std, live: isTerminal(std.in)}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.open(args); err != nil {
		return err
	}
	return s.run(ctx)
}

// open parses the flags, and opens the model.
func (s *session) open(args []string) (err error) {
	c := &s.flags
	f := newFlags("chat", chatAbout)
	c.model.add(f)
	c.sampling.add(f)
	c.long.add(f)
	f.text(&c.system, "sys,system-prompt", "", "`text` of the system's message; without it, there is no such message")
	f.text(&c.tools, "tools", "", "`file` with the tools that the model may call: a JSON list, as OpenAI's API has it. Calls are written as the model writes them")
	f.integer(&c.tokens, "n,predict,n-predict,max-new-tokens", 0, "most `tokens` of an answer; 0: as many as the context takes, and with -context-shift any number")
	f.integer(&c.draft, "draft,draft-n", 0, "most `tokens` to guess from what the conversation repeats, and to check in one step; 0: none")
	f.stops(&c.stops)
	f.is(&c.special, "sp,special", showSpecial)
	f.is(&c.stats, "stats", "write what was computed after each answer to standard error")
	if err := f.parse(args, s.std); err != nil {
		return err
	}
	if c.tokens < 0 {
		return usagef("-n is %d, less than 0", c.tokens)
	}
	if s.tools, err = readTools(c.tools, s.std.in); err != nil {
		return err
	}
	if s.model, err = c.model.open(); err != nil {
		return err
	}
	if n := s.model.world.Size; n > 1 {
		return usagef("WORLD_SIZE is %d, and a conversation has one process: leanlm generate has ranks", n)
	}
	if s.templates, err = s.model.Templates(); err != nil {
		return fmt.Errorf("%w: leanlm generate continues texts without a template", err)
	}
	if s.ends, err = s.model.ChatEnds(s.templates); err != nil {
		return err
	}
	s.clear()
	if err := s.checkTools(); err != nil {
		return err
	}
	s.sampling = c.sampling.of(s.model, s.std)
	c.model.options.Batch, c.model.options.Draft = 1, c.draft
	s.engine, err = c.model.engine(s.model, s.std)
	return err
}

func (s *session) close() (err error) {
	if s.engine != nil {
		err = s.engine.Close()
	}
	if s.model != nil {
		err = errors.Join(err, s.model.Close())
	}
	return err
}

// readTools reads the file of -tools. The keys of each tool keep their order.
func readTools(name string, in io.Reader) (tools []json.RawMessage, err error) {
	if name == "" {
		return nil, nil
	}
	if name == "-" {
		return nil, usagef("-tools - is standard input, from which messages are read")
	}
	text, err := readText(name, in)
	if err != nil {
		return nil, fmt.Errorf("-tools: %w", err)
	}
	if err := json.Unmarshal([]byte(text), &tools); err != nil {
		return nil, fmt.Errorf("-tools %s: no JSON list of tools: %w", name, err)
	}
	if len(tools) == 0 {
		return nil, fmt.Errorf("-tools %s: the list is empty", name)
	}
	for i, tool := range tools {
		if tool = bytes.TrimSpace(tool); tool[0] != '{' {
			return nil, fmt.Errorf("-tools %s: tool %d is no JSON object", name, i+1)
		}
	}
	return tools, nil
}

// checkTools returns an error if the template has no place for tools.
func (s *session) checkTools() error {
	if s.tools == nil {
		return nil
	}
	messages := append(slices.Clone(s.messages), chat.Message{Role: "user", Content: "Hello"})
	with, err := s.templates.Render(chat.Conversation{Messages: messages, Tools: s.tools})
	if err != nil {
		return fmt.Errorf("-tools: %w", err)
	}
	without, err := s.templates.Render(chat.Conversation{Messages: messages})
	if err == nil && with == without {
		return fmt.Errorf("-tools: the model's chat template has no place for tools")
	}
	return nil
}

// run reads lines until the conversation ends.
func (s *session) run(ctx context.Context) error {
	in := bufio.NewReader(s.std.in)
	for ctx.Err() == nil {
		line, more, err := s.line(in)
		switch {
		case err != nil:
			return err
		case strings.HasPrefix(line, "/") && !strings.HasPrefix(line, "//"):
			if line = strings.TrimSpace(line); line == "/quit" {
				more = false
			} else {
				s.command(line)
			}
		case line != "":
			if err := s.turn(ctx, strings.TrimPrefix(line, "/")); err != nil {
				return err
			}
		}
		if !more {
			break
		}
	}
	if s.unanswered > 0 && !s.live {
		return fmt.Errorf("%d of %d messages had no answer", s.unanswered, s.asked)
	}
	return ctx.Err()
}

// line reads a message or a command. more reports whether another line may follow.
func (s *session) line(in *bufio.Reader) (line string, more bool, err error) {
	prompt := "> "
	for {
		if s.live {
			fmt.Fprint(s.std.err, prompt)
		}
		part, err := in.ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return "", false, err
		}
		part, goesOn := strings.CutSuffix(strings.TrimRight(part, "\r\n"), `\`)
		if line += part; !goesOn || err != nil {
			return line, err == nil, nil
		}
		line += "\n"
		prompt = "... "
	}
}

// say writes a line of the session's own to standard error.
func (s *session) say(format string, args ...any) {
	fmt.Fprintln(s.std.err, printable(fmt.Sprintf(format, args...)))
}

// command runs a command. A wrong command names the nearest right one.
func (s *session) command(line string) {
	switch line {
	case "/help":
		fmt.Fprint(s.std.err, sessionHelp)
	case "/undo":
		if len(s.turns) == 0 {
			s.say("/undo: there is no message to drop")
			return
		}
		question := s.messages[s.turns[len(s.turns)-1]]
		s.undo()
		s.say("dropped %q and its answer", short(question.Content))
	case "/clear":
		s.clear()
		s.say("the conversation begins anew")
	case "/fork":
		s.forks = append(s.forks, fork{slices.Clone(s.messages), slices.Clone(s.turns)})
		s.say("fork %d, after %d messages", len(s.forks), len(s.turns))
	case "/back":
		if len(s.forks) == 0 {
			s.say("/back: there is no fork; /fork makes one")
			return
		}
		last := len(s.forks) - 1
		s.messages, s.turns, s.forks = s.forks[last].messages, s.forks[last].turns, s.forks[:last]
		s.say("back at fork %d, after %d messages", last+1, len(s.turns))
	default:
		s.say("no command %q%s; // begins a message that begins with /", short(line), nearCommand(line))
	}
}

// nearCommand names the command that a wrong one may have meant, or all commands.
func nearCommand(line string) string {
	best, least := "", max(1, len(line)/3)+1
	for _, name := range sessionCommands {
		if d := distance(line, name); d < least {
			best, least = name, d
		}
		if len(line) > 1 && strings.HasPrefix(name, line) {
			best, least = name, 0
		}
	}
	if best != "" {
		return ": did you mean " + best + "?"
	}
	return ": the commands are " + strings.Join(sessionCommands, ", ")
}

// short cuts a text for a line of the session's own.
func short(text string) string {
	const most = 60
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "..."
}

// clear makes the conversation one without questions.
func (s *session) clear() {
	s.messages, s.turns = nil, nil
	if s.flags.system != "" {
		s.messages = []chat.Message{{Role: "system", Content: s.flags.system}}
	}
}

// undo drops the last question, and all messages after it.
func (s *session) undo() {
	last := len(s.turns) - 1
	s.messages, s.turns = s.messages[:s.turns[last]], s.turns[:last]
}

// turn asks a question, and writes the answer. The returned error ends the conversation.
func (s *session) turn(ctx context.Context, question string) error {
	s.turns = append(s.turns, len(s.messages))
	s.messages = append(slices.Clip(s.messages), chat.Message{Role: "user", Content: question})
	s.asked++
	ids, err := s.prompt()
	if err != nil {
		s.drop(err)
		return nil
	}
	answering, stop := signal.NotifyContext(ctx, os.Interrupt)
	defer stop()
	how := s.sampling
	how.Seed += uint64(s.asked - 1) // a question that is asked again has another answer
	r := decoder.Request{Prompt: ids, Tokens: s.flags.tokens, Sampling: how, Ends: s.ends, Stop: s.flags.stops, Special: s.flags.special, Draft: s.flags.draft}
	s.flags.long.set(&r, s.model)
	before := s.engine.Stats().Rows
	text, err := s.engine.Start(answering, r)
	if err != nil {
		s.drop(err)
		return nil
	}
	var answer strings.Builder
	var added []int
	for token, err := range text.Tokens() {
		if err != nil {
			s.drop(s.flags.model.hint(err))
			return write(s.std, "\n")
		}
		if token.ID >= 0 {
			added = append(added, token.ID)
		}
		answer.WriteString(token.Text)
		if err := write(s.std, token.Text); err != nil {
			return err
		}
	}
	content, n := answer.String(), len(added)
	if s.flags.special {
		ids := slices.DeleteFunc(slices.Clone(added), func(id int) bool { return slices.Contains(s.ends, id) })
		content = messageText(s.model.Tokenizer(), ids, content, text.Reason() == decoder.Stopped)
	}
	s.messages = append(s.messages, chat.Message{Role: "assistant", Content: content})
	if err := write(s.std, "\n"); err != nil {
		return err
	}
	if s.flags.stats {
		s.say("%d tokens before the answer, and %d in the answer; %d were computed; the context has %d", len(ids), n, s.engine.Stats().Rows-before, s.engine.Options().Context)
	}
	if n := text.Dropped(); n > 0 {
		s.say("%d tokens of the conversation were dropped for this answer: the context has %d", n, s.engine.Options().Context)
	}
	switch text.Reason() {
	case decoder.Full:
		s.say("the answer ends early: the context has %d tokens, %d of them of the messages before; %s, and -context-shift drops old tokens", s.engine.Options().Context, len(ids), makeRoom)
	case decoder.Cancelled:
		if !s.live {
			return context.Canceled
		}
	}
	return nil
}

const makeRoom = "/undo drops the last message and its answer, /clear drops all, -c makes the context larger"

// prompt returns the tokens of the conversation and of the beginning of an answer.
func (s *session) prompt() ([]int, error) {
	text, err := s.templates.Render(chat.Conversation{Messages: s.messages, Tools: s.tools, AddGenerationPrompt: true})
	if err != nil {
		return nil, err
	}
	ids, err := s.model.Tokenizer().Encode(text, tokenizer.Options{Special: true, Bare: true})
	if most := s.engine.Options().Context; err == nil && len(ids) > most && !s.flags.long.cut {
		err = fmt.Errorf("with it the conversation has %d tokens, and the context has %d; %s, and -keep drops old tokens", len(ids), most, makeRoom)
	}
	return ids, err
}

// drop drops the last question, which has no answer, and tells why.
func (s *session) drop(why error) {
	s.undo()
	s.unanswered++
	s.say("the message was dropped: %v", why)
}
