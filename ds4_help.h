/* The texts that the tools print about themselves, apart from the code so that they can be read and edited as text. */
#ifndef DS4_HELP_H
#define DS4_HELP_H

/* What `ds4 --help` prints, group by group, ended by NULL. It states every default; the tests compare these with the ones in
 * use and see that no option is missing. */
extern const char *const ds4_help_cli[];
/* What /help prints in the chat. */
extern const char ds4_help_chat[];

#endif
